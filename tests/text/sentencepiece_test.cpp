#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/text/text_files.h"
#include "bonfire/text/tokenizer.h"
#include "tests/support/shell.h"

namespace bonfire::sentencepiece_test {
namespace {

namespace fs = std::filesystem;

const std::string program = BONFIRE_BUILD_DIR "/bonfire_sentencepiece";
const std::string oracle = BONFIRE_BUILD_DIR "/sentencepiece_oracle";

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

TEST(ByteTokenizer, BytesAreThemselves) {
  const auto tokenizer = byte_tokenizer();
  EXPECT_EQ(tokenizer->vocab(), 256);
  const std::string text("a\0\n\xff\x80z", 6);
  const auto tokens = tokenizer->encoder()->encode(text);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{'a', 0, '\n', 255, 128, 'z'}));
  EXPECT_EQ(tokenizer->decode(tokens), text);
}

TEST(SentencePiece, GivesWhatItsOwnLibraryGives) {
  if (!fs::exists(program) || !fs::exists(oracle)) GTEST_SKIP() << "built without SentencePiece";
  const testing::Folder folder;
  const auto content = some_text(5000);
  const auto text = folder / "text";
  folder.write("text", content);
  const auto prefix = (folder.path() / "m").string(), answer = (folder.path() / "answer").string();
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
  std::vector<std::int64_t> found;
  encode_files(*tokenizer, {.paths = {text}, .threads = 2},
               [&](auto tokens, bool) { found.insert(found.end(), tokens.begin(), tokens.end()); });
  EXPECT_EQ(found, expected);

  // And back; its piece of a token is found under its name.
  EXPECT_EQ(tokenizer->decode(expected), content.substr(0, content.find_last_not_of(' ') + 1));
  EXPECT_EQ(tokenizer->find("</s>"), tokenizer->end_of_text());
  EXPECT_EQ(tokenizer->find("no such piece"), std::nullopt);
  // Two encoders and the tokenizer itself do not disturb each other, nor does what is not UTF-8.
  const auto one = tokenizer->encoder(), other = tokenizer->encoder();
  const auto tokens = one->encode("bonfire");
  EXPECT_EQ(other->encode("bonfire"), tokens);
  EXPECT_EQ(tokenizer->decode(tokens), "bonfire");
  EXPECT_FALSE(one->encode("\xff\xc3").empty());
  EXPECT_TRUE(one->encode("").empty());
}

TEST(SentencePiece, SaysWhatIsWrongWithAModel) {
  const testing::Folder folder;
  const auto message_of = [&](const SentencePieceOptions& options) -> std::string {
    try {
      sentencepiece_tokenizer(options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_NE(message_of({.model = "x.model", .program = (folder.path() / "none").string()}).find("libsentencepiece-dev"),
            std::string::npos);
  if (!fs::exists(program)) GTEST_SKIP() << "built without SentencePiece";
  EXPECT_NE(message_of({.model = (folder.path() / "x.model").string(), .program = program}).find("x.model': No such file"),
            std::string::npos);
  const auto broken = folder / "broken.model";
  folder.write("broken.model", "this is no model");
  EXPECT_NE(message_of({.model = broken, .program = program}).find("broken.model': SentencePiece failed"), std::string::npos)
      << message_of({.model = broken, .program = program});
}

}  // namespace
}  // namespace bonfire::sentencepiece_test
