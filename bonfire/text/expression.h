#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace bonfire {

// A regular expression over Unicode text, compiled by PCRE2. Its white space is Unicode's, as in the expressions of
// tokenizer files. Any thread may match.
class Expression {
 public:
  // Throws ConfigError that says where the expression is wrong.
  explicit Expression(const std::string& pattern);

  // Calls `take(begin, end)` for every match, from left to right; none of them is empty. REQUIRES: well-formed text. Throws
  // Error where a match takes more steps or memory than PCRE2 allows.
  void each_match(std::string_view text, const std::function<void(std::size_t begin, std::size_t end)>& take) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
  std::string pattern_;
};

}  // namespace bonfire
