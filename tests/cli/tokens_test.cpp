#include <gtest/gtest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bonfire/data/token_file.h"
#include "tests/cli/command.h"

namespace bonfire {
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
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path()))
    EXPECT_EQ(entry.path().string().find("x."), std::string::npos) << entry.path();
}

}  // namespace
}  // namespace bonfire
