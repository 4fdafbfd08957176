#include "bonfire/text/text_files.h"

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "tests/support/shell.h"
#include "tests/text/golden_tokenizers.h"

namespace bonfire::text_files_test {
namespace {

std::string written(const testing::Folder& folder, const std::string& name, const std::string& text) {
  folder.write(name, text);
  return folder / name;
}

using Documents = std::vector<std::vector<std::int64_t>>;

Documents documents_of(const Tokenizer& tokenizer, const EncodeFilesOptions& options) {
  Documents documents(1);
  encode_files(tokenizer, options, [&](auto tokens, bool ends) {
    documents.back().insert(documents.back().end(), tokens.begin(), tokens.end());
    if (ends) documents.emplace_back();
  });
  EXPECT_TRUE(documents.back().empty());
  documents.pop_back();
  return documents;
}

std::string text_of(const std::string& family, std::size_t bytes) {
  std::string text;
  for (std::size_t round = 0; text.size() < bytes; ++round)
    for (const auto& golden : testing::golden_strings(family)) text += golden.bytes + (round % 3 ? "\n" : " \n\nx");
  return text;
}

// A document of several megabytes is encoded in pieces: the tokens are those of the whole, whatever the number of threads.
TEST(TextFiles, PiecesAreTheWhole) {
  for (const auto& family : testing::golden_families) {
    const testing::Folder folder;
    const std::string text = text_of(family, 2500000);
    const auto tokenizer = tokenizer_file(testing::golden_tokenizer(family));
    const std::vector<std::string> paths{written(folder, "a.txt", text), written(folder, "empty.txt", ""),
                                         written(folder, "b.txt", "one fire")};
    const auto encoder = tokenizer->encoder();
    const Documents expected{encoder->encode(text), encoder->encode(""), encoder->encode("one fire")};
    for (const int threads : {1, 3})
      EXPECT_EQ(documents_of(*tokenizer, {.paths = paths, .threads = threads}), expected) << family;
  }
}

TEST(TextFiles, ALineOfJsonIsADocument) {
  const testing::Folder folder;
  const auto tokenizer = byte_tokenizer();
  std::string lines;
  Documents expected;
  for (int line = 0; line < 60000; ++line) {
    const auto text = fmt::format("line {} has \"text\" and é\n", line);
    lines += nlohmann::json{{"body", text}, {"number", line}}.dump() + (line % 5 ? "\n" : "\r\n\n");
    expected.emplace_back();
    for (const char byte : text) expected.back().push_back(static_cast<unsigned char>(byte));
  }
  const auto path = written(folder, "a.jsonl", lines);
  ASSERT_GT(lines.size(), 3u << 20);
  for (const int threads : {1, 4})
    EXPECT_EQ(documents_of(*tokenizer, {.paths = {path}, .field = "body", .threads = threads}), expected);
}

TEST(TextFiles, ADocumentEndsWithTheEndOfTextOnce) {
  const testing::Folder folder;
  std::filesystem::copy(testing::golden_tokenizer("gpt2"), folder.path() / "tokenizer.json");
  folder.write("tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  const auto tokenizer = open_tokenizer({.name = folder.path().string()});
  const auto end = tokenizer->find("<|endoftext|>").value();
  const std::vector<std::string> paths{written(folder, "a.txt", "x"), written(folder, "b.txt", "x<|endoftext|>"),
                                       written(folder, "c.txt", "")};
  const auto x = tokenizer->find("x").value();
  EXPECT_EQ(documents_of(*tokenizer, {.paths = paths}), (Documents{{x, end}, {x, end}, {end}}));
}

TEST(TextFiles, WhatIsWrongIsSaidOfTheFirstPlace) {
  const testing::Folder folder;
  const auto tokenizer = byte_tokenizer();
  std::string lines;
  for (int line = 1; line <= 100000; ++line)
    lines += line == 70001 ? "{\"text\": 5}\n" : line == 90000 ? "nonsense\n" : "{\"text\": \"a line of some length\"}\n";
  const auto refused = [&](const std::string& path, const std::string& words) {
    for (const int threads : {1, 4}) {
      try {
        documents_of(*tokenizer, {.paths = {path}, .threads = threads});
        ADD_FAILURE() << words;
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    }
  };
  refused(written(folder, "a.jsonl", lines), "a.jsonl:70001:2: is an integer, must be a string");
  refused(written(folder, "b.jsonl", "{\"text\": \"x\"}\n{\"other\": \"x\"}\n"), "b.jsonl:2:1: 'text' is missing");
  refused((folder.path() / "none.txt").string(), "No such file");
  // Who takes may refuse: the threads end, and the error arrives.
  EXPECT_THROW(encode_files(*tokenizer, {.paths = {written(folder, "c.txt", lines)}, .threads = 4},
                            [](auto, bool) { fail("enough"); }),
               Error);
}

}  // namespace
}  // namespace bonfire::text_files_test
