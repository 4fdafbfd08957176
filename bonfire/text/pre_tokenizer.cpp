#include "bonfire/text/pre_tokenizer.h"

#include <fmt/format.h>

#include "bonfire/text/expression.h"
#include "bonfire/text/normalizer.h"

namespace bonfire {
namespace {

// GPT-2's words, which ByteLevel makes where it is told to.
constexpr const char* gpt2_words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::function<void(std::string_view, const std::function<void(std::size_t, std::size_t)>&)> matcher_of(const Json& pattern) {
  if (const auto regex = pattern.find("Regex")) {
    try {
      return [expression = Expression(regex->string())](std::string_view text, const auto& take) {
        expression.each_match(text, take);
      };
    } catch (const std::exception& error) {
      regex->refuse(error.what());
    }
  }
  return [literal = literal_pattern(pattern)](std::string_view text, const auto& take) {
    for (std::size_t at = text.find(literal); at != std::string_view::npos; at = text.find(literal, at + literal.size()))
      take(at, at + literal.size());
  };
}

// Text between two positions, if there is any.
void put(std::string_view text, std::size_t begin, std::size_t end, PreTokenizer::Words& words) {
  if (end > begin) words.push_back(text.substr(begin, end - begin));
}

bool flag(const Json& json, std::string_view key, bool missing) {
  const auto value = json.find(key);
  return value ? value->boolean() : missing;
}

}  // namespace

PreTokenizer::Words PreTokenizer::words(std::string_view text) const {
  Words words{text}, parts;
  for (const auto& split : splits_) {
    parts.clear();
    for (const auto word : words) split(word, parts);
    std::swap(words, parts);
  }
  return words;
}

void PreTokenizer::add(const Json& json) {
  const std::string& type = json.at("type").string();
  if (byte_level_)
    json.refuse(fmt::format("pre_tokenizer '{}' follows ByteLevel, which is supported only as the last one", type));
  if (type == "Sequence")
    for (const auto& step : json.at("pretokenizers").items()) add(step);
  else if (type == "Split")
    add_split(json);
  else if (type == "ByteLevel")
    add_byte_level(json);
  else if (type == "Metaspace")
    add_metaspace(json);
  else
    json.refuse(fmt::format("pre_tokenizer '{}' is not supported; allowed: Sequence, Split, ByteLevel, Metaspace", type));
}

void PreTokenizer::add_split(const Json& json) {
  const std::string& behavior = json.at("behavior").string();
  if (behavior != "Isolated" && behavior != "Removed")
    json.at("behavior").refuse(fmt::format("'{}' is not supported; allowed: Isolated, Removed", behavior));
  const bool isolated = behavior == "Isolated", inverted = flag(json, "invert", false);
  const bool matches = isolated || inverted, gaps = isolated || !inverted;
  splits_.push_back([match = matcher_of(json.at("pattern")), matches, gaps](std::string_view text, Words& words) {
    std::size_t done = 0;
    match(text, [&](std::size_t begin, std::size_t end) {
      if (gaps) put(text, done, begin, words);
      if (matches) put(text, begin, end, words);
      done = end;
    });
    if (gaps) put(text, done, text.size(), words);
  });
}

void PreTokenizer::add_byte_level(const Json& json) {
  byte_level_ = true;
  if (flag(json, "add_prefix_space", true)) {
    if (cuts()) json.at("add_prefix_space").refuse("is true behind another pre_tokenizer, which is not supported");
    preparations_.push_back([](std::string& text, Section section) {
      if (!section.continues && !text.starts_with(' ')) text.insert(text.begin(), ' ');
    });
  }
  if (!flag(json, "use_regex", true)) return;
  splits_.push_back([expression = Expression(gpt2_words)](std::string_view text, Words& words) {
    std::size_t done = 0;
    expression.each_match(text, [&](std::size_t begin, std::size_t end) {
      put(text, done, begin, words);
      put(text, begin, end, words);
      done = end;
    });
    put(text, done, text.size(), words);
  });
}

void PreTokenizer::add_metaspace(const Json& json) {
  if (cuts()) json.refuse("pre_tokenizer 'Metaspace' is supported only before those that cut");
  const std::string& letter = json.at("replacement").string();
  if (letter.empty()) json.at("replacement").refuse("is empty");
  // Older files say add_prefix_space.
  const auto scheme = json.find("prepend_scheme");
  const std::string prepend = scheme ? scheme->string() : flag(json, "add_prefix_space", true) ? "always" : "never";
  if (prepend != "always" && prepend != "first" && prepend != "never")
    scheme->refuse(fmt::format("'{}' is not supported; allowed: always, first, never", prepend));
  preparations_.push_back([letter, prepend](std::string& text, Section section) {
    replace_all(text, " ", letter);
    const bool wanted = prepend == "always" || (prepend == "first" && section.first);
    if (wanted && !section.continues && !text.starts_with(letter)) text.insert(0, letter);
  });
  if (!flag(json, "split", true)) return;
  splits_.push_back([letter](std::string_view text, Words& words) {
    std::size_t begin = 0;
    for (std::size_t at = text.find(letter); at != std::string_view::npos; at = text.find(letter, at + letter.size())) {
      put(text, begin, at, words);
      begin = at;
    }
    put(text, begin, text.size(), words);
  });
}

}  // namespace bonfire
