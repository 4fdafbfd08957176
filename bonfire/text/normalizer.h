#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bonfire/base/json.h"
#include "bonfire/text/section.h"

namespace bonfire {

// What a tokenizer changes in text before it looks for tokens: the key `normalizer` of its file.
class Normalizer {
 public:
  using Step = std::function<void(std::string& text, Section section)>;

  Normalizer() = default;
  // Throws ConfigError that names what is not supported.
  explicit Normalizer(const Json& json) { add(json); }

  bool empty() const { return steps_.empty(); }
  // REQUIRES: well-formed text, which it stays.
  void apply(std::string& text, Section section) const {
    for (const auto& step : steps_) step(text, section);
  }

 private:
  void add(const Json& json);

  std::vector<Step> steps_;
};

// Every occurrence of `from`, which is not empty, from left to right.
void replace_all(std::string& text, const std::string& from, const std::string& to);
// {"String": "..."}: the only pattern that is supported where text is replaced.
const std::string& literal_pattern(const Json& pattern);

}  // namespace bonfire
