#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bonfire/data/token_file.h"
#include "tests/cli/command.h"

namespace bonfire::tokens_test {
namespace {

std::string text_of(const std::filesystem::path& path) {
  const TokenFile file(path.string());
  std::vector<std::int64_t> tokens(file.size());
  file.copy(0, tokens);
  return {tokens.begin(), tokens.end()};
}

TEST(Tokens, TextBecomesAFileOfItsBytes) {
  const testing::Scratch scratch;
  scratch.write("a.txt", "many torches\n");
  scratch.write("b.txt", "one fire\n");
  for (const std::string format : {"llmc", "megatron"}) {
    const auto ended = scratch.bonfire("tokens a.txt b.txt -o " + format + ".bin --format " + format);
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(ended.out, format + ".bin: 22 tokens of 2 bytes, vocabulary 256\n");
    EXPECT_EQ(text_of(scratch.path() / (format + ".bin")), "many torches\none fire\n");
  }
  const auto json = nlohmann::json::parse(scratch.bonfire("tokens a.txt -o c.bin --json").out);
  EXPECT_EQ(json.at("tokens"), 13);
  EXPECT_EQ(json.at("vocab"), 256);
}

// A model's folder, JSON lines, and back again.
TEST(Tokens, TextGoesThroughATokenizerAndBack) {
  const testing::Scratch scratch;
  std::filesystem::create_directory(scratch.path() / "model");
  std::filesystem::copy(BONFIRE_SOURCE_DIR "/tests/text/golden/llama3/tokenizer.json", scratch.path() / "model");
  scratch.write("model/tokenizer_config.json", R"({"eos_token": "<|end_of_text|>"})");
  scratch.write("a.jsonl", "{\"body\": \"Many torches, \\u00e9t\\u00e9\"}\n{\"body\": \"one fire\"}\n");
  const auto ended = scratch.bonfire("tokens a.jsonl -o a.bin --tokenizer model --field body");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto text = scratch.bonfire("tokens --decode a.bin --tokenizer model");
  EXPECT_EQ(text.out, "<|begin_of_text|>Many torches, \u00e9t\u00e9<|end_of_text|><|begin_of_text|>one fire<|end_of_text|>")
      << text.err;
  EXPECT_EQ(scratch.bonfire("tokens --decode a.bin --tokenizer model --first 0 --count 1").out, "<|begin_of_text|>");
  const auto json = nlohmann::json::parse(scratch.bonfire("tokens --decode a.bin --tokenizer model --count 1 --json").out);
  EXPECT_EQ(json.at("text"), "<|begin_of_text|>");
}

TEST(Tokens, BadRequestsAreOneLineAndLeaveNothing) {
  const testing::Scratch scratch;
  scratch.write("a.txt", "many torches\n");
  const auto refused = [&](const std::string& arguments, const std::string& words) {
    const auto ended = scratch.bonfire("tokens " + arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_NE(ended.err.find(words), std::string::npos) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  };
  refused("none.txt -o x.bin", "'none.txt': No such file");
  refused("a.txt -o x.tok", "must end in .bin");
  refused("a.txt -o x.bin --tokenizer none.model", "none.model");
  refused("a.txt -o x.bin --format parquet", "parquet");
  refused("a.txt", "--output is required");
  scratch.write("a.jsonl", "{\"text\": \"x\"}\n{\"text\": 7}\n");
  refused("a.jsonl -o x.bin", "a.jsonl:2:2: is an integer, must be a string");
  refused("a.txt -o x.bin --tokenizer .", "'.': has neither a tokenizer.json nor a tokenizer.model");
  scratch.write("tokenizer.json", R"({"model": {"type": "WordPiece"}})");
  refused("a.txt -o x.bin --tokenizer .", "tokenizer.json:1:12: model 'WordPiece' is not supported; allowed: BPE");
  refused("--decode a.txt", "a.txt");
  ASSERT_EQ(scratch.bonfire("tokens a.txt -o good.bin").code, 0);
  refused("--decode good.bin --tokenizer " BONFIRE_SOURCE_DIR "/tests/text/golden/none/tokenizer.json", "No such file");
  refused("--decode good.bin -o x.txt", "--output: text is written to stdout");
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path()))
    EXPECT_EQ(entry.path().string().find("x."), std::string::npos) << entry.path();
}

}  // namespace
}  // namespace bonfire::tokens_test
