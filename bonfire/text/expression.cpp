#include "bonfire/text/expression.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

constexpr std::size_t stack_bytes = 1 << 20;

std::string message_of(int error) {
  PCRE2_UCHAR message[256];
  pcre2_get_error_message(error, message, sizeof(message));
  return reinterpret_cast<const char*>(message);
}

// PCRE2's \s has U+180E, which Unicode has not called white space since version 6.3.
std::string with_unicode_space(const std::string& pattern) {
  std::string out;
  for (std::size_t at = 0; at < pattern.size(); ++at) {
    out += pattern[at];
    if (pattern[at] != '\\' || at + 1 == pattern.size()) continue;
    const char escaped = pattern[++at];
    if (escaped == 's')
      out += "p{White_Space}";
    else if (escaped == 'S')
      out += "P{White_Space}";
    else
      out += escaped;
  }
  return out;
}

}  // namespace

struct Expression::Compiled {
  explicit Compiled(pcre2_code* made) : code(made) {}
  ~Compiled() { pcre2_code_free(code); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

  pcre2_code* code;
};

Expression::Expression(const std::string& pattern) : pattern_(pattern) {
  const std::string adapted = with_unicode_space(pattern);
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), &pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE where = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(adapted.data()), adapted.size(), PCRE2_UTF | PCRE2_UCP,
                                   &error, &where, context.get());
  if (code == nullptr) fail_config("the expression '{}' cannot be read: {}", pattern, message_of(error));
  compiled_ = std::make_shared<const Compiled>(code);
  // Where the machine forbids to make code it is interpreted.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

void Expression::each_match(std::string_view text,
                            const std::function<void(std::size_t begin, std::size_t end)>& take) const {
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
      pcre2_match_context_create(nullptr), &pcre2_match_context_free);
  const std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack(
      pcre2_jit_stack_create(32 << 10, stack_bytes, nullptr), &pcre2_jit_stack_free);
  pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create_from_pattern(compiled_->code, nullptr), &pcre2_match_data_free);
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.get());
  for (std::size_t at = 0; at < text.size();) {
    const int found = pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match.get(), context.get());
    if (found == PCRE2_ERROR_NOMATCH) return;
    require(found > 0, "the expression '{}' fails at byte {} of a text: {}", pattern_, at, message_of(found));
    take(ends[0], ends[1]);
    at = ends[1];
  }
}

}  // namespace bonfire
