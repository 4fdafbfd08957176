#include "bonfire/schedule/action.h"

#include <charconv>

#include <fmt/format.h>

namespace bonfire::schedule {
namespace {

constexpr std::array<std::string_view, kKinds> kLetters = {"F",  "B",  "I",       "W",       "U",      "SF", "RF",
                                                           "SB", "RB", "UNSHARD", "RESHARD", "REDUCE", "TIE"};

// Takes a number without sign off the front of the text.
std::optional<std::int32_t> take_number(std::string_view& text) {
  if (text.empty() || text.front() < '0' || text.front() > '9') return std::nullopt;
  std::int32_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

}  // namespace

std::string_view letters(Kind kind) { return kLetters[static_cast<std::size_t>(kind)]; }

std::string to_text(const Action& action) {
  if (has_microbatch(action.kind)) return fmt::format("{}{}{}", action.stage, letters(action.kind), action.microbatch);
  return fmt::format("{}{}", action.stage, letters(action.kind));
}

std::optional<Action> parse_action(std::string_view text) {
  const auto stage = take_number(text);
  if (!stage) return std::nullopt;
  const auto word = text.substr(0, text.find_first_of("0123456789"));
  text.remove_prefix(word.size());
  for (std::size_t i = 0; i < kLetters.size(); ++i) {
    if (word != kLetters[i]) continue;
    Action action{*stage, static_cast<Kind>(i), -1};
    if (has_microbatch(action.kind)) {
      const auto number = take_number(text);
      if (!number) return std::nullopt;
      action.microbatch = *number;
    }
    if (!text.empty()) return std::nullopt;
    return action;
  }
  return std::nullopt;
}

std::string_view action_forms() {
  return "2F0 2B0 2I0 2W0 2U, messages 2SF0 2RF0 2SB0 2RB0, collectives 2UNSHARD 2RESHARD 2REDUCE 2TIE0";
}

}  // namespace bonfire::schedule
