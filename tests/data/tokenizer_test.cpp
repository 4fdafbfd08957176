#include "bonfire/data/tokenizer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

const std::string program = BONFIRE_BUILD_DIR "/bonfire_sentencepiece";
const std::string oracle = BONFIRE_BUILD_DIR "/sentencepiece_oracle";

class TokenizerTest : public testing::Test {
 protected:
  TokenizerTest() {
    auto pattern = (fs::temp_directory_path() / "bonfire-tokenizer-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~TokenizerTest() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }

  fs::path folder_;
};

std::vector<std::int64_t> tokens_of(const Tokenizer& tokenizer, const std::string& path) {
  std::vector<std::int64_t> tokens;
  tokenizer.encode_file(path, [&](auto piece) { tokens.insert(tokens.end(), piece.begin(), piece.end()); });
  return tokens;
}

// Lines of words made of few syllables, so that a model finds pieces longer than a letter.
std::string some_text(int words) {
  const std::vector<std::string> syllables{"bon", "fi", "re", "ma", "ny", "tor", "ches", "ön", "一"};
  const Random random(4);
  std::string text;
  for (std::uint64_t word = 0; word < static_cast<std::uint64_t>(words); ++word) {
    for (std::uint64_t part = 0; part < 3; ++part) text += syllables[random.below(4 * word + part, syllables.size())];
    text += random.below(4 * word + 3, 12) == 0 ? '\n' : ' ';
  }
  return text;
}

TEST_F(TokenizerTest, BytesAreThemselves) {
  const auto tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab(), 256);
  const std::string text("a\0\n\xff\x80z", 6);
  EXPECT_EQ(tokens_of(*tokenizer, write("text", text)), (std::vector<std::int64_t>{'a', 0, '\n', 255, 128, 'z'}));
  EXPECT_TRUE(tokens_of(*tokenizer, write("empty", "")).empty());
  const auto large = some_text(20000);
  const auto tokens = tokens_of(*tokenizer, write("large", large));
  ASSERT_EQ(tokens.size(), large.size());
  for (std::size_t at = 0; at < large.size(); ++at) ASSERT_EQ(tokens[at], static_cast<unsigned char>(large[at]));
  EXPECT_THROW(tokens_of(*tokenizer, (folder_ / "none").string()), ConfigError);
  EXPECT_THROW(tokens_of(*tokenizer, folder_.string()), ConfigError);
}

TEST_F(TokenizerTest, SentencePieceGivesWhatItsOwnLibraryGives) {
  if (!fs::exists(program) || !fs::exists(oracle)) GTEST_SKIP() << "built without SentencePiece";
  const auto text = write("text", some_text(5000));
  const auto prefix = (folder_ / "m").string(), answer = (folder_ / "answer").string();
  ASSERT_EQ(std::system(fmt::format("'{}' '{}' '{}' > '{}' 2> '{}'", oracle, prefix, text, answer, answer + ".log").c_str()),
            0);
  std::ifstream file(answer);
  std::int64_t vocab = 0;
  file >> vocab;
  std::vector<std::int64_t> expected;
  for (std::int64_t token = 0; file >> token;) expected.push_back(token);

  const auto tokenizer = sentencepiece_tokenizer({.model = prefix + ".model", .program = program});
  EXPECT_EQ(tokenizer->vocab(), vocab);
  EXPECT_EQ(vocab, 400);
  EXPECT_GT(expected.size(), 5000);
  EXPECT_EQ(tokens_of(*tokenizer, text), expected);

  // Who takes may stop: the program ends, and the error arrives.
  EXPECT_THROW(tokenizer->encode_file(text, [](auto) { fail("enough"); }), Error);
}

TEST_F(TokenizerTest, SaysWhatIsWrongWithAModel) {
  const auto message_of = [&](const SentencePieceOptions& options) -> std::string {
    try {
      sentencepiece_tokenizer(options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_NE(message_of({.model = "x.model", .program = (folder_ / "none").string()}).find("libsentencepiece-dev"),
            std::string::npos);
  if (!fs::exists(program)) GTEST_SKIP() << "built without SentencePiece";
  EXPECT_NE(message_of({.model = (folder_ / "x.model").string(), .program = program}).find("x.model': No such file"),
            std::string::npos);
  const auto broken = write("broken.model", "this is no model");
  EXPECT_NE(message_of({.model = broken, .program = program}).find("broken.model': SentencePiece failed"), std::string::npos)
      << message_of({.model = broken, .program = program});
}

}  // namespace
}  // namespace bonfire
