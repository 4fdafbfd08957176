#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"

// The events of one optimizer step: what a rank does with its Units and flat buffers, in the order in which it issues it.
// Collectives, memory and time of a step are all read from it.
namespace bonfire::plan {

// One Unit, as far as the events depend on it.
struct StepUnit {
  std::optional<std::size_t> flat{};  // the buffer that holds its own parameters
  bool root = false;                  // what it holds stays from the beginning of forward to the end of backward
  bool backward = true;               // something in it, or in a Unit before it, is trained
  std::vector<std::size_t> writes{};  // buffers to whose gradients its backward adds: its own, and those of tied weights
};

// The path of a parameter in the model: "blocks.3.feed.up.weight".
BONFIRE_API std::string full_name(const UnitDescription& unit, const ParameterDescription& parameter);

// The Units in forward order; the buffers are those of flats_of.
BONFIRE_API std::vector<StepUnit> step_units(const ModelDescription& model, const std::vector<FlatLayout>& flats);

// Whether what comes into a Unit has a gradient. `before`: whether what comes into the first one has.
BONFIRE_API bool input_differentiates(const std::vector<StepUnit>& units, std::size_t unit, bool before);

enum class Act {
  gather,          // a buffer gets its memory; its Unit runs when the gather has ended
  forward,         // of a Unit
  let_go,          // a buffer's memory is freed
  keep_part,       // a buffer's memory is freed, but this rank's part of it among `ranks` ranks stays
  open_gradients,  // memory for a buffer's whole gradient is borrowed, where ranks keep shares of it only
  backward,        // of a Unit
  reduce,          // a buffer's gradient is complete, and its reduction begins
  end_of_pass,     // of a microbatch: all reductions have ended
};

struct Event {
  Act act = Act::forward;
  std::size_t index = 0;  // of the Unit (forward, backward) or of the buffer
  int microbatch = 0;
  int ranks = 0;  // gather, keep_part: among how many ranks
  int place = 0;  // gather: its number in the pass
};

// Of a step from the second on, when the order is known.
//
// The gathers of a pass have one order: those of the Units in forward order, then, in reverse order, those of the Units
// whose memory was freed in between. The last Unit of forward stays, and so does the root. When the use of a Unit begins,
// the `prefetch` gathers that follow its own are issued before its own is waited for: also those of backward while forward
// still runs, but none of the next pass. A Unit whose memory has yet to be freed stops that. With `after_reduction` the same
// happens, in backward, when the Unit's reduction was issued.
BONFIRE_API std::vector<Event> events_of_step(const std::vector<StepUnit>& units, const DataParallel& layout);

// At most so many whole gradients exist at once, where ranks keep shares of them only: for another one, the reduction that
// was issued first is waited for.
BONFIRE_API int whole_gradient_limit(const DataParallel& layout);

}  // namespace bonfire::plan
