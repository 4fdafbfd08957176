#include "bonfire/text/text_stream.h"

#include <gtest/gtest.h>

#include "tests/text/golden_tokenizers.h"

namespace bonfire::text_stream_test {
namespace {

TEST(TextStream, TokenByTokenIsTheSameText) {
  for (const auto& family : testing::golden_families) {
    const auto tokenizer = tokenizer_file(testing::golden_tokenizer(family));
    for (const auto& golden : testing::golden_strings(family)) {
      for (const std::size_t at_once : {1, 3}) {
        TextStream stream(*tokenizer);
        std::string text;
        const std::span<const std::int64_t> all(golden.tokens);
        for (std::size_t at = 0; at < all.size(); at += at_once)
          text += stream.push(all.subspan(at, std::min(at_once, all.size() - at)));
        text += stream.finish();
        EXPECT_EQ(text, golden.all) << family;
      }
    }
  }
}

TEST(TextStream, GivesNoHalfCharacters) {
  const auto tokenizer = byte_tokenizer();
  TextStream stream(*tokenizer);
  const auto push = [&](std::int64_t token) { return stream.push(std::vector<std::int64_t>{token}); };
  EXPECT_EQ(push('a'), "a");
  EXPECT_EQ(push(0xF0), "");
  EXPECT_EQ(push(0x9F), "");
  EXPECT_EQ(push(0x94), "");
  EXPECT_EQ(push(0xA5), "\xF0\x9F\x94\xA5");
  EXPECT_EQ(push(0xC3), "");
  EXPECT_EQ(stream.finish(), "\xC3");
}

}  // namespace
}  // namespace bonfire::text_stream_test
