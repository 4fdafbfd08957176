#include "bonfire/base/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::json_test {
namespace {
using bonfire::testing::Folder;
using bonfire::testing::thrown;

std::string error_of(std::string_view text) {
  return thrown<ConfigError>([&] { parse_json(text, "a.json"); });
}

TEST(Json, HoldsWhatTheTextSays) {
  const Json json =
      parse_json(R"( {"a": [1, -2.5e2, true, false, null], "b": {"c": "dé\n\u00e9\ud83d\ude00"}, "": 0} )", "a");
  const auto items = json.at("a").items();
  ASSERT_EQ(items.size(), 5u);
  EXPECT_EQ(items[0].integer(), 1);
  EXPECT_EQ(items[0].number(), 1.0);
  EXPECT_EQ(items[1].number(), -250.0);
  EXPECT_TRUE(items[2].boolean());
  EXPECT_FALSE(items[3].boolean());
  EXPECT_TRUE(items[4].is_null());
  EXPECT_FALSE(items[3].is_null());
  EXPECT_EQ(json.at("b").at("c").string(), "dé\né😀");
  EXPECT_EQ(json.members()[1].first, "b");
  EXPECT_EQ(json.at("").integer(), 0);
  EXPECT_FALSE(json.find("x"));
  EXPECT_EQ(parse_json("9223372036854775807", "a").integer(), INT64_MAX);
  EXPECT_EQ(parse_json("-9223372036854775808", "a").integer(), INT64_MIN);
  EXPECT_EQ(parse_json("0.1", "a").number(), 0.1);
  EXPECT_EQ(parse_json(R"("\u0000")", "a").string(), std::string(1, '\0'));
}

TEST(Json, AValueOutlivesTheOneItCameFrom) {
  const Json inner = parse_json(R"({"a": {"b": "c"}})", "a").at("a");
  EXPECT_EQ(inner.at("b").string(), "c");
}

TEST(Json, WhatIsNotThereIsNamedWithItsPlace) {
  const Json json = parse_json("{\n  \"a\": 1,\n  \"b\": [\"x\", {}]\n}\n", "a.json");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("c"); }), "a.json:1:1: 'c' is missing");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("a").string(); }), "a.json:2:3: is an integer, must be a string");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("b").items()[0].integer(); }), "a.json:3:9: is a string, must be an integer");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("b").items()[1].at("d"); }), "a.json:3:14: 'd' is missing");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("b").members(); }), "a.json:3:3: is a list, must be an object");
  EXPECT_EQ(thrown<ConfigError>([&] { json.at("a").refuse("is 1, must be 2"); }), "a.json:2:3: is 1, must be 2");
}

TEST(Json, WhatIsNotJsonIsNamedWithItsPlace) {
  const std::pair<const char*, const char*> bad[] = {
      {"", "1:1: not JSON: the text ends here"},
      {"{\n \"a\": 1,\n}", "3:1: not JSON: a key in quotes is expected"},
      {"[1 2]", "1:4: not JSON: ',' or ']' is expected"},
      {"[1,", "1:4: not JSON: the text ends here"},
      {"{\"a\" 1}", "1:6: not JSON: ':' is expected"},
      {"{\"a\": 1 \"b\"}", "1:9: not JSON: ',' or '}' is expected"},
      {"1 1", "1:3: not JSON: something follows the value"},
      {"01", "1:2: not JSON: a number does not begin with 0"},
      {"1.x", "1:3: not JSON: a digit is expected"},
      {"-x", "1:2: not JSON: a digit is expected"},
      {"1ex", "1:3: not JSON: a digit is expected"},
      {"NaN", "1:1: not JSON: a value is expected"},
      {"\xEF\xBB\xBF{}", "1:1: not JSON: a value is expected"},
      {"// no", "1:1: not JSON: a value is expected"},
      {"\"a\tb\"", "1:3: not JSON: a control character in a string, which must be written as \\u00XX"},
      {"\"\\x\"", "1:3: not JSON: no such escape"},
      {"\"\\u12g4\"", "1:6: not JSON: four hexadecimal digits are expected"},
      {"\"\\ud800 \"", "1:8: not JSON: half of a surrogate pair"},
      {"\"\\ud800\\u0041\"", "1:14: not JSON: half of a surrogate pair"},
      {"\"\\udc00\"", "1:8: not JSON: half of a surrogate pair"},
      {"\"a", "1:3: not JSON: the text ends here"},
      {"\"\xC0\x80\"", "1:2: not JSON: bytes that are not UTF-8"},
      {"\"\xED\xA0\x80\"", "1:2: not JSON: bytes that are not UTF-8"},
      {"\"\xF4\x90\x80\x80\"", "1:2: not JSON: bytes that are not UTF-8"},
      {"\"\xE2\x82\"", "1:2: not JSON: bytes that are not UTF-8"},
      {"{\"a\": 1,\n\"b\": 2,\n \"a\": 3}", "3:2: not JSON: the key 'a' comes twice"},
      {"[9223372036854775808]", "1:2: not JSON: 9223372036854775808 cannot be held by 64 bits"},
      {"1e999", "1:1: not JSON: 1e999 cannot be held by a double"},
  };
  for (const auto& [text, message] : bad) EXPECT_EQ(error_of(text), std::string("a.json:") + message) << text;
}

TEST(Json, DepthIsBounded) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(error_of(nested(most_json_depth)), "");
  EXPECT_EQ(error_of(nested(most_json_depth + 1)),
            "a.json:1:65: not JSON: more than 64 lists and objects inside one another");
  EXPECT_NE(error_of(std::string(10'000'000, '[')), "");
  std::string objects;
  for (int depth = 0; depth < 1000; ++depth) objects += "{\"a\":";
  EXPECT_NE(error_of(objects), "");
}

TEST(Json, AFileIsNamed) {
  const Folder folder;
  folder.write("a.json", "{\"a\": tru}");
  EXPECT_EQ(thrown<ConfigError>([&] { read_json(folder / "a.json"); }),
            folder / "a.json" + ":1:7: not JSON: a value is expected");
  EXPECT_NE(thrown<ConfigError>([&] { read_json(folder / "b.json"); }).find("No such file"), std::string::npos);
  folder.write("a.json", "{\"a\": true}\n");
  EXPECT_TRUE(read_json(folder / "a.json").at("a").boolean());
}

bool equal(const Json& json, const nlohmann::json& other) {
  if (other.is_null()) return json.is_null();
  if (other.is_boolean()) return json.boolean() == other.get<bool>();
  if (other.is_number_integer()) return json.integer() == other.get<std::int64_t>();
  if (other.is_number()) return json.number() == other.get<double>();
  if (other.is_string()) return json.string() == other.get<std::string>();
  if (other.is_array()) {
    const auto items = json.items();
    if (items.size() != other.size()) return false;
    for (std::size_t at = 0; at < items.size(); ++at)
      if (!equal(items[at], other[at])) return false;
    return true;
  }
  const auto members = json.members();
  if (members.size() != other.size()) return false;
  for (const auto& [key, value] : members)
    if (!other.contains(key) || !equal(value, other[key])) return false;
  return true;
}

// Against another reader: texts with one to three bytes changed, most of them no longer JSON. What only this one refuses has
// a reason of its own.
TEST(Json, AgreesWithAnotherReader) {
  const std::string seeds[] = {R"({"a": [1, -2.5e-2, true, null], "b": {"c": "d\u00e9\n", "e": []}, "f": 12345678901})",
                               "[\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\", \"\\ud83d\\ude00\", 0.0, -0, 1E+2, {}]\n",
                               R"([{"name": "x", "shape": [2, 3]}, {"name": "y", "shape": []}, "\\\"\/", false])"};
  const std::string bytes = "{}[]\",:0123456789.eE+-\\/ubnrtfalsn \n\t\x01\x80\xBF\xC3\xE2\xED\xF0\xF4\xFF";
  const Random random(2024);
  std::uint64_t draw = 0;
  int accepted = 0;
  for (int time = 0; time < 30'000; ++time) {
    std::string text = seeds[random.below(draw++, 3)];
    const auto edits = random.below(draw++, 4);
    for (std::uint64_t edit = 0; edit < edits && !text.empty(); ++edit) {
      const auto at = random.below(draw++, text.size());
      const char byte = bytes[random.below(draw++, bytes.size())];
      switch (random.below(draw++, 3)) {
        case 0: text[at] = byte; break;
        case 1: text.insert(at, 1, byte); break;
        default: text.erase(at, 1); break;
      }
    }
    const auto other = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto error = error_of(text);
    if (error.empty()) {
      ++accepted;
      ASSERT_FALSE(other.is_discarded()) << text;
      ASSERT_TRUE(equal(parse_json(text, "a"), other)) << text;
    } else {
      ASSERT_EQ(error.find('\n'), std::string::npos) << text;
      ASSERT_TRUE(other.is_discarded() || error.find("comes twice") != std::string::npos ||
                  error.find("cannot be held") != std::string::npos)
          << text << "\n"
          << error;
    }
  }
  EXPECT_GT(accepted, 5'000);
  EXPECT_LT(accepted, 25'000);
}

}  // namespace
}  // namespace bonfire::json_test
