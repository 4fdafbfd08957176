#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bonfire/plan/sharding.h"
#include "tests/random/module_case.h"
#include "tests/random/update.h"
#include "tests/random/verdict.h"

// A data-parallel run as a value: the module, how it is sharded and over how many ranks, its optimizer, and what the user
// does.
namespace bonfire::cases {

enum class Wrap { every, types, min_parameters, predicate, all_in_one, tied, ignored, unknown_type, two_at_once };

struct EngineOptions {
  plan::Sharded what = plan::Sharded::none;
  bool reshard = true;
  int reshard_ranks = 0;
  int prefetch = 2;
  bool prefetch_after_reduction = false;
  bool full_accumulation = false;
  plan::Offload offload = plan::Offload::none;
  Wrap wrap = Wrap::every;
  int bucket_bytes = 0, first_bucket_bytes = 0;  // 0: as they are unless said
  bool negotiate = false;
  bool broadcast = false;  // ranks start with weights of their own
  bool build_scope = false;
  bool debug = false;
  int versions = 1;
  bool own_options = false;  // of Units, for some of them
  int recompute = 0;         // Units that run again in backward: 0: none; 1: all that can; 2, 3: every second of those
};

enum class Act {
  train,            // microbatches, then a step
  evaluate,         // a forward without gradients
  drop,             // a forward whose graph nobody uses
  read,             // whole parameters are looked at
  write,            // and changed
  backward_twice,   // before one step
  step_alone,       // without a backward before it
  accumulate_step,  // with accumulate alone before it
  throw_forward,    // then a step
  throw_backward,   // the same
  throw_on_one,     // the last rank, and all hear of it; nothing comes after it
  late,             // forwards, and then the backward of each, with an update behind it
};

// Which targets do not count, where they are numbers of classes.
enum class Mask { none, some, microbatch, all };

struct Event {
  Act act = Act::train;
  int microbatches = 1;
  bool retain = false;        // a second backward through the same graph
  bool two_forwards = false;  // before one backward
  int frozen = 0;             // which of the patterns of frozen parameters holds; 0: as the model was built
  int samples = 2;
  bool uneven = false;  // ranks have different numbers of samples, perhaps none
  bool input_gradient = false;
  int length = 0;        // of sequences, where the model has them
  bool lengths = false;  // microbatches and ranks differ in it
  Mask mask = Mask::none;
  int after = 0;  // which call of the root throws
};

struct EngineCase {
  std::uint64_t seed = 0;
  Model model;
  int ranks = 1;
  int factor = 1;
  EngineOptions options;
  Update update;
  bool classes = false;  // the loss is a cross-entropy: the mean over all targets of a step that count
  std::vector<Event> script;
  bool look_often = false;  // whole parameters are compared after every event, not only at the end
  bool several = false;     // the root only holds: each of its children has an engine, and all have one backward

  bool comes_and_goes() const {
    return (options.what == plan::Sharded::parameters && factor > 1) || options.offload == plan::Offload::parameters ||
           options.versions > 1;
  }
};

std::string name_of(Mask mask);

// What the documentation says of it.
Verdict verdict_of(const EngineCase& each);
// Whether a second backward before the step adds to the first, and is not refused.
bool backward_may_repeat(const EngineCase& each);

EngineCase draw_engine_case(std::uint64_t seed);
std::string text_of(const EngineCase& each);
std::vector<EngineCase> simpler(const EngineCase& each);

}  // namespace bonfire::cases
