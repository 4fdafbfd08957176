#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/json.h"
#include "bonfire/text/section.h"

namespace bonfire {

// How a tokenizer cuts text into words, which no token crosses: the key `pre_tokenizer` of its file.
class PreTokenizer {
 public:
  using Words = std::vector<std::string_view>;

  PreTokenizer() = default;
  // Throws ConfigError that names what is not supported.
  explicit PreTokenizer(const Json& json) { add(json); }

  // Whether tokens are spelled by the letters that stand for bytes.
  bool byte_level() const { return byte_level_; }
  bool cuts() const { return !splits_.empty(); }

  // What is changed in a section before it is cut.
  void prepare(std::string& text, Section section) const {
    for (const auto& step : preparations_) step(text, section);
  }
  // The words of a prepared section, in order. What stands in none of them has no tokens.
  Words words(std::string_view text) const;

 private:
  using Preparation = std::function<void(std::string& text, Section section)>;
  using Split = std::function<void(std::string_view text, Words& words)>;

  void add(const Json& json);
  void add_split(const Json& json);
  void add_byte_level(const Json& json);
  void add_metaspace(const Json& json);

  std::vector<Preparation> preparations_;
  std::vector<Split> splits_;
  bool byte_level_ = false;
};

}  // namespace bonfire
