#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

// Tokenizers of each family and what `tokenizers` makes of odd strings with them: tests/peers/tokenizer_families.py.
namespace bonfire::testing {

inline const std::vector<std::string> golden_families{"gpt2", "llama3", "qwen", "tekken", "llama2", "mistral", "metaspace"};

inline std::filesystem::path golden_tokenizer(const std::string& family) {
  return std::filesystem::path(BONFIRE_SOURCE_DIR) / "tests/text/golden" / family / "tokenizer.json";
}

struct GoldenString {
  std::string bytes;  // perhaps not UTF-8
  std::vector<std::int64_t> tokens;
  std::string text, all;  // of the tokens, without and with special ones
};

inline std::vector<GoldenString> golden_strings(const std::string& family) {
  std::vector<GoldenString> strings;
  std::ifstream file(golden_tokenizer(family).replace_filename("expected.jsonl"));
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line);
    GoldenString golden{.bytes = {}, .tokens = json.at("ids"), .text = json.at("text"), .all = json.at("all")};
    const std::string hex = json.at("bytes");
    for (std::size_t at = 0; at < hex.size(); at += 2)
      golden.bytes += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
    strings.push_back(golden);
  }
  return strings;
}

}  // namespace bonfire::testing
