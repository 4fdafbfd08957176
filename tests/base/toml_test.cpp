#include "bonfire/base/toml.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"

namespace bonfire::toml_test {
namespace {

std::string error_of(const std::string& text) {
  try {
    parse_toml(text, "a.toml");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Toml, KeepsTheOrderAndTheLinesOfTheFile) {
  const auto table = parse_toml("zebra = 1\n\n[model]\nlayers = 6\ndim = 256\n", "a.toml");
  ASSERT_EQ(table.size(), 2u);
  EXPECT_EQ(table[0].key, "zebra");
  EXPECT_EQ(table[0].value.line, 1);
  const auto& model = std::get<TomlTable>(table[1].value.is);
  EXPECT_EQ(model[0].key, "layers");
  EXPECT_EQ(model[0].value.line, 4);
  EXPECT_EQ(model[1].key, "dim");
  EXPECT_EQ(model[1].value.line, 5);
}

TEST(Toml, WhatIsWrittenReadsBackTheSame) {
  for (const char* text : {"true", "-7", "0.1", "1e-300", "3.0", "1e+22", "inf", "\"a \\\"b\\\" \\\\ \\n\\u0001\"",
                           "[1, [2.5, \"x\"]]", "[{units = 5, replicas = 3}]"}) {
    const auto once = parse_toml(std::string("x = ") + text, "a.toml")[0].value;
    const auto twice = parse_toml("x = " + to_toml(once), "a.toml")[0].value;
    EXPECT_EQ(to_toml(once), to_toml(twice));
    EXPECT_EQ(once.is.index(), twice.is.index()) << text << " became " << to_toml(once);
  }
  EXPECT_EQ(std::get<double>(parse_toml("x = 0.1", "")[0].value.is), 0.1);
}

TEST(Toml, ErrorsNameTheFileAndTheLine) {
  EXPECT_EQ(error_of("a = 1\nb = = 2\n").rfind("a.toml:2: not TOML: ", 0), 0u) << error_of("a = 1\nb = = 2\n");
  EXPECT_EQ(error_of("a = 1\na = 2\n").rfind("a.toml:2: ", 0), 0u) << error_of("a = 1\na = 2\n");
  EXPECT_EQ(error_of("\nwhen = 2020-01-01\n").rfind("a.toml:2: dates", 0), 0u);
  EXPECT_THROW(read_toml("/nonexistent/file.toml"), ConfigError);
  EXPECT_THROW(read_toml("/"), ConfigError);
}

TEST(Toml, LettersBeyondAsciiStandInStringsAndCommentsOnly) {
  const auto table = parse_toml(
      "\xef\xbb\xbf# \xc3\xa9\n"
      "a = \"\xc3\xa9 \\\" \xc3\xa9\" # \xc3\xbc\n"
      "b = '\xc3\xa9'\n"
      "c = \"\"\"\n\xc3\xa9\" \xc3\xa9\"\"\"\"\"\n"
      "d = '''\xc3\xa9\n'''\n"
      "e = [\"\xc3\xa9\", '\xc3\xa9']\n"
      "\"\xc3\xa9\".f = {\"\xc3\xa9\" = 1}\n",
      "a.toml");
  ASSERT_EQ(table.size(), 6u);
  EXPECT_EQ(std::get<std::string>(table[2].value.is), "\xc3\xa9\" \xc3\xa9\"\"");
  for (const char* text : {"a = \"x\"\nb = \xc3\xa9\n", "a = \"\"\"x\"\"\" \xc3\xa9", "#\n[\xc3\xbc]", "a = 27'T\xc3\xbc'\n",
                           "\n[\x1a\"a\"]", "\n\x7f", "a = \"open\n\xc3\xa9 = 1\n"})
    EXPECT_EQ(error_of(text).find("a.toml:"), 0u) << text;
  EXPECT_NE(error_of("a = 1\n\xc3\xa9 = 1\n").find("a.toml:2: not TOML"), std::string::npos);
}

TEST(Toml, NearestFindsTyposAndLeavesOtherWordsAlone) {
  const std::vector<std::string> keys = {"layers", "heads", "kv_heads", "warmup", "weight_decay", "decay", "lr"};
  EXPECT_EQ(nearest("layer", keys), "layers");
  EXPECT_EQ(nearest("laeyrs", keys), "layers");
  EXPECT_EQ(nearest("weight-decay", keys), "weight_decay");
  EXPECT_EQ(nearest("Weight_Decay", keys), "weight_decay");
  EXPECT_EQ(nearest("warmup_steps", keys), "warmup");
  EXPECT_EQ(nearest("decay", keys), "decay");
  EXPECT_EQ(nearest("banana", keys), "");
  EXPECT_EQ(nearest("", keys), "");
}

}  // namespace
}  // namespace bonfire::toml_test
