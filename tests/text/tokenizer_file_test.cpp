#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <thread>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/text/tokenizer.h"
#include "tests/support/shell.h"
#include "tests/text/golden_tokenizers.h"

namespace bonfire::tokenizer_file_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::golden_families;
using testing::golden_strings;
using testing::golden_tokenizer;

TEST(TokenizerFile, EncodesAndDecodesAsTokenizersDoes) {
  for (const auto& family : golden_families) {
    const auto tokenizer = tokenizer_file(golden_tokenizer(family));
    const auto encoder = tokenizer->encoder();
    const auto strings = golden_strings(family);
    ASSERT_GT(strings.size(), 30);
    for (const auto& golden : strings) {
      EXPECT_EQ(encoder->encode(golden.bytes), golden.tokens) << family << ": " << golden.bytes;
      EXPECT_EQ(tokenizer->decode(golden.tokens, {.special_tokens = false}), golden.text) << family;
      EXPECT_EQ(tokenizer->decode(golden.tokens), golden.all) << family;
    }
  }
}

// Nothing is remembered that should not be: the second time, in another order, and in other threads the tokens are the same.
TEST(TokenizerFile, EncodersDoNotDependOnWhatTheyHaveSeen) {
  for (const auto& family : golden_families) {
    const auto tokenizer = tokenizer_file(golden_tokenizer(family));
    const auto strings = golden_strings(family);
    std::vector<std::vector<std::int64_t>> found(4);
    std::vector<std::jthread> threads;
    for (auto& tokens : found)
      threads.emplace_back([&] {
        const auto encoder = tokenizer->encoder();
        for (int round = 0; round < 3; ++round)
          for (auto golden = strings.rbegin(); golden != strings.rend(); ++golden)
            encoder->encode(golden->bytes, {}, tokens);
      });
    threads.clear();
    std::vector<std::int64_t> expected;
    for (int round = 0; round < 3; ++round)
      for (auto golden = strings.rbegin(); golden != strings.rend(); ++golden)
        expected.insert(expected.end(), golden->tokens.begin(), golden->tokens.end());
    for (const auto& tokens : found) EXPECT_EQ(tokens, expected) << family;
  }
}

// Merging by the definition: of all pairs in the word the one of the lowest rank, and of equal ones the left one.
std::vector<std::string> merged_slowly(std::vector<std::string> parts, const std::map<std::string, std::size_t>& ranks) {
  while (true) {
    std::size_t best = ranks.size(), at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto rank = ranks.find(parts[i] + ' ' + parts[i + 1]);
      if (rank == ranks.end() || rank->second >= best) continue;
      best = rank->second;
      at = i;
    }
    if (best == ranks.size()) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

// Merges that compete for the same letters, in an order that no training gives, over text that nothing cuts.
TEST(TokenizerFile, MergesByRankAndFromTheLeft) {
  const Random random(7);
  for (std::uint64_t round = 0; round < 30; ++round) {
    const Random draw = random.fork(round);
    json vocab, merges = json::array();
    std::int64_t id = 0;
    for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = id++;
    std::vector<std::string> tokens{"a", "b", "c", "▁"};
    for (const auto& token : tokens) vocab[token] = id++;
    std::map<std::string, std::size_t> ranks;
    for (std::uint64_t i = 0; i < 40; ++i) {
      const auto& left = tokens[draw.below(2 * i, tokens.size())];
      const auto& right = tokens[draw.below(2 * i + 1, tokens.size())];
      if (left.size() + right.size() > 8 || vocab.contains(left + right)) continue;
      ranks.emplace(left + ' ' + right, merges.size());
      merges.push_back({left, right});
      vocab[left + right] = id++;
      tokens.push_back(left + right);
    }
    const testing::Folder folder;
    folder.write("tokenizer.json",
                 json{{"model", {{"type", "BPE"}, {"byte_fallback", true}, {"vocab", vocab}, {"merges", merges}}}}.dump());
    const auto tokenizer = tokenizer_file(folder.path() / "tokenizer.json");
    const auto encoder = tokenizer->encoder();
    for (std::uint64_t length = 1; length < 60; ++length) {
      std::string text;
      std::vector<std::string> letters;
      for (std::uint64_t at = 0; at < length; ++at) {
        letters.push_back(tokens[draw.below(1000 * length + at, 4)]);
        text += letters.back();
      }
      std::vector<std::int64_t> expected;
      for (const auto& token : merged_slowly(letters, ranks)) expected.push_back(vocab.at(token));
      ASSERT_EQ(encoder->encode(text), expected) << text;
    }
  }
}

TEST(TokenizerFile, KnowsItsVocabulary) {
  const auto tokenizer = tokenizer_file(golden_tokenizer("llama3"));
  EXPECT_EQ(tokenizer->find("<|eot_id|>"), tokenizer->vocab() - 1);
  EXPECT_EQ(tokenizer->find("no token"), std::nullopt);
  EXPECT_EQ(tokenizer->end_of_text(), std::nullopt);
  const std::vector<std::int64_t> outside{-1, tokenizer->vocab(), std::int64_t{1} << 40};
  EXPECT_EQ(tokenizer->decode(outside), "");

  // tokenizer_config.json has the name of the end of text, in one of two ways.
  for (const char* name : {R"("<|eot_id|>")", R"({"content": "<|eot_id|>", "special": true})"}) {
    const testing::Folder folder;
    fs::copy(golden_tokenizer("llama3"), folder.path() / "tokenizer.json");
    folder.write("tokenizer_config.json", fmt::format(R"({{"eos_token": {}}})", name));
    EXPECT_EQ(open_tokenizer({.name = folder.path().string()})->end_of_text(), tokenizer->find("<|eot_id|>"));
  }
}

TEST(TokenizerFile, WhatIsNotSupportedIsNamed) {
  const testing::Folder folder;
  const auto refused = [&](const std::string& family, const std::function<void(json&)>& change, const std::string& words) {
    std::ifstream file(golden_tokenizer(family));
    auto changed = json::parse(file);
    change(changed);
    folder.write("tokenizer.json", changed.dump());
    try {
      tokenizer_file(folder.path() / "tokenizer.json");
      ADD_FAILURE() << "not refused: " << words;
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(words), std::string::npos) << message;
      EXPECT_NE(message.find("tokenizer.json:1:"), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
  };
  refused(
      "gpt2", [](json& file) { file["model"]["type"] = "Unigram"; }, "model 'Unigram' is not supported");
  refused(
      "gpt2", [](json& file) { file["model"]["dropout"] = 0.1; }, "'dropout' is supported only as null or 0");
  refused(
      "gpt2", [](json& file) { file["model"]["end_of_word_suffix"] = "</w>"; }, "'end_of_word_suffix' is supported only");
  refused(
      "gpt2",
      [](json& file) {
        file["normalizer"] = {{"type", "Lowercase"}};
      },
      "normalizer 'Lowercase' is not supported");
  refused(
      "gpt2",
      [](json& file) {
        file["pre_tokenizer"] = {{"type", "Whitespace"}};
      },
      "pre_tokenizer 'Whitespace' is not");
  refused(
      "gpt2",
      [](json& file) {
        file["post_processor"] = {{"type", "BertProcessing"}};
      },
      "post_processor 'BertProcessing'");
  refused(
      "gpt2",
      [](json& file) {
        file["decoder"] = {{"type", "WordPiece"}};
      },
      "decoder 'WordPiece' is not supported");
  refused(
      "gpt2", [](json& file) { file["added_tokens"][0]["single_word"] = true; }, "is true, which is not supported");
  refused(
      "gpt2", [](json& file) { file["added_tokens"][0]["id"] = -1; }, "token -1 must be 0 to");
  refused(
      "gpt2", [](json& file) { file["added_tokens"][0]["id"] = std::int64_t{1} << 40; }, "must be 0 to");
  refused(
      "gpt2", [](json& file) { file["model"]["vocab"]["a"] = file["model"]["vocab"]["b"]; }, "is also 'a'");
  refused(
      "gpt2", [](json& file) { file["model"]["vocab"].erase("Ġ"); }, "the vocabulary has no token 'Ġ'");
  refused(
      "gpt2",
      [](json& file) {
        file["model"]["merges"][0] = {"x", "unheard of"};
      },
      "the vocabulary has no token");
  refused(
      "gpt2", [](json& file) { file["model"]["merges"][0] = {"x"}; }, "has 1 tokens, must have 2");
  refused(
      "gpt2", [](json& file) { file["model"]["merges"][0] = "one two three"; }, "must be two tokens with a space");
  refused(
      "gpt2", [](json& file) { file["model"].erase("vocab"); }, "'vocab' is missing");
  refused(
      "llama2", [](json& file) { file["model"]["byte_fallback"] = false; }, "supported only with the pre_tokenizer");
  refused(
      "llama2", [](json& file) { file["model"]["vocab"].erase("<0x0A>"); }, "no token '<0x0A>'");
  refused(
      "llama2", [](json& file) { file["post_processor"]["special_tokens"]["<s>"]["ids"] = {9999999}; },
      "names token 9999999");
  refused(
      "llama3", [](json& file) { file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(?i:'s"; },
      "cannot be read: ");
  refused(
      "llama3", [](json& file) { file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"; },
      "'MergedWithNext' is not supported");
  refused(
      "mistral", [](json& file) { file["pre_tokenizer"]["prepend_scheme"] = "sometimes"; }, "'sometimes' is not supported");
}

// Whatever a file says, it is read or refused.
TEST(TokenizerFile, ChangedFilesAreReadOrRefused) {
  const testing::Folder folder;
  const Random random(11);
  int refused = 0;
  for (std::uint64_t round = 0; round < 300; ++round) {
    const Random draw = random.fork(round);
    std::ifstream file(golden_tokenizer(golden_families[draw.below(0, golden_families.size())]));
    std::string text{std::istreambuf_iterator<char>(file), {}};
    for (std::uint64_t change = 0; change < 1 + draw.below(1, 3); ++change) {
      // The beginning is where the parts are; what follows are thousands of tokens of one kind.
      const std::size_t at = draw.below(10 + change, draw.below(20 + change, 2) ? 3000 : text.size());
      const auto kind = draw.below(30 + change, 3);
      if (kind == 0) text[at] = static_cast<char>(draw.below(40 + change, 128));
      if (kind == 1) text.erase(at, 1 + draw.below(50 + change, 40));
      if (kind == 2) text.insert(at, text.substr(draw.below(60 + change, text.size()), 1 + draw.below(70 + change, 40)));
    }
    folder.write("tokenizer.json", text);
    try {
      const auto tokenizer = tokenizer_file(folder.path() / "tokenizer.json");
      const auto tokens = tokenizer->encoder()->encode("Many torches, één 1234 <s> 中文\n\n");
      for (const auto token : tokens) EXPECT_LT(token, tokenizer->vocab());
      tokenizer->decode(tokens);
    } catch (const ConfigError& error) {
      ++refused;
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace bonfire::tokenizer_file_test
