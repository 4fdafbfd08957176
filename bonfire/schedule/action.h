#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"

namespace bonfire::schedule {

// What a rank does in one cell. The text form of a cell is the stage, these letters, and the number of the microbatch where
// there is one: `2F0` is the forward of stage 2 on microbatch 0.
//
// Sends, receives and collectives are only issued by their cell and then run beside the computation, each communicator's in
// the order issued. The computation that needs the result waits for it.
enum class Kind : std::uint8_t {
  forward,           // 2F0
  backward,          // 2B0        both gradients
  input_gradient,    // 2I0        the gradient of the stage's input alone; 2W0 follows sooner or later
  weight_gradient,   // 2W0        the gradient of the stage's weights, after 2I0
  update,            // 2U         the optimizer's step for the stage's weights
  send_forward,      // 2SF0       the stage's output, to stage 3
  receive_forward,   // 2RF0       the stage's input, from stage 1
  send_backward,     // 2SB0       the gradient of the stage's input, to stage 1
  receive_backward,  // 2RB0       the gradient of the stage's output, from stage 3
  unshard,           // 2UNSHARD   gathers the stage's weights
  reshard,           // 2RESHARD   lets go of them
  reduce,            // 2REDUCE    reduces the stage's gradients over its data-parallel ranks
  tie,               // 2TIE0      sums the gradients of tied weights over all stages with a TIE of that number
};
inline constexpr int kKinds = 13;

struct Action {
  std::int32_t stage = 0;
  Kind kind = Kind::forward;
  std::int32_t microbatch = -1;  // -1: the kind has none; for tie: the number of the group

  bool operator==(const Action&) const = default;
};

BONFIRE_API std::string_view letters(Kind kind);  // "F", "UNSHARD"

// Whether the kind's text ends in a number.
constexpr bool has_microbatch(Kind kind) {
  return kind != Kind::update && kind != Kind::unshard && kind != Kind::reshard && kind != Kind::reduce;
}
// Takes the rank's time; all other kinds are only issued.
constexpr bool is_compute(Kind kind) { return kind <= Kind::update; }
constexpr bool is_send(Kind kind) { return kind == Kind::send_forward || kind == Kind::send_backward; }
constexpr bool is_receive(Kind kind) { return kind == Kind::receive_forward || kind == Kind::receive_backward; }
constexpr bool is_message(Kind kind) { return is_send(kind) || is_receive(kind); }
constexpr bool is_sharding(Kind kind) { return kind == Kind::unshard || kind == Kind::reshard; }
// Lets go of what the forward kept.
constexpr bool ends_activation(Kind kind) { return kind == Kind::backward || kind == Kind::weight_gradient; }
// Makes the gradient that the stage before needs.
constexpr bool makes_input_gradient(Kind kind) { return kind == Kind::backward || kind == Kind::input_gradient; }

BONFIRE_API std::string to_text(const Action& action);

// Nothing where the text is no action.
BONFIRE_API std::optional<Action> parse_action(std::string_view text);

// One line that says how actions are written.
BONFIRE_API std::string_view action_forms();

}  // namespace bonfire::schedule
