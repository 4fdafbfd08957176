#include "bonfire/text/utf8.h"

#include <gtest/gtest.h>

namespace bonfire::utf8_test {
namespace {

// The examples of the Unicode Standard, section 3.9, tables 3-8 to 3-11.
TEST(Utf8, WhatIsNotWellFormedIsReplacedAsTheStandardRecommends) {
  const std::string r(utf8::replacement);
  EXPECT_EQ(utf8::repaired("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8::repaired("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8::repaired("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(utf8::repaired("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(utf8::repaired("letters \xC3\xA9 and \xF0\x9F\x94\xA5, sixteen and more of them"),
            "letters \xC3\xA9 and \xF0\x9F\x94\xA5, sixteen and more of them");
}

TEST(Utf8, EveryCharacterIsWellFormedAndNothingElse) {
  const auto encoded = [](std::uint32_t code) {
    std::string out;
    if (code < 0x80) return out += static_cast<char>(code);
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    out += static_cast<char>((0xFF00 >> (more + 1) & 0xFF) | code >> (6 * more));
    for (int at = more - 1; at >= 0; --at) out += static_cast<char>(0x80 | (code >> (6 * at) & 0x3F));
    return out;
  };
  for (std::uint32_t code = 0; code < 0x110000; code += code < 0x1000 ? 1 : 7) {
    const bool surrogate = code >= 0xD800 && code < 0xE000;
    const std::string character = encoded(code);
    ASSERT_EQ(utf8::well_formed(character), !surrogate) << code;
    if (surrogate) continue;
    for (std::size_t bytes = 1; bytes < character.size(); ++bytes) {
      ASSERT_FALSE(utf8::well_formed(character.substr(0, bytes)));
      ASSERT_EQ(utf8::unfinished("x" + character.substr(0, bytes)), bytes) << code;
    }
    ASSERT_EQ(utf8::unfinished("x" + character), 0) << code;
  }
  EXPECT_FALSE(utf8::well_formed("\xF4\x90\x80\x80"));
  EXPECT_FALSE(utf8::well_formed("12345678\xC0\x80"));
  EXPECT_EQ(utf8::unfinished("\x80\x80"), 0);
}

TEST(Utf8, WhiteSpaceIsUnicodes) {
  EXPECT_EQ(utf8::space_at_start(" \t\xC2\xA0\xE3\x80\x80x "), 7);
  EXPECT_EQ(utf8::space_at_end("x \xE2\x80\xA8\n"), 5);
  EXPECT_EQ(utf8::space_at_start("\xE2\x80\x8Bx"), 0);  // zero width space is none
  EXPECT_EQ(utf8::space_at_start(""), 0);
  EXPECT_EQ(utf8::space_at_end("  "), 2);
}

}  // namespace
}  // namespace bonfire::utf8_test
