#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"

// How many bytes a rank needs, from the model and the layout alone.
namespace bonfire::plan {

// What a rank holds of the model between steps, padding included: exact.
struct ModelState {
  std::int64_t parameters = 0;  // what forward reads of them
  std::int64_t masters = 0;     // what the optimizer updates, where forward reads a rounded copy
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t host = 0;  // what of these was offloaded, and is not counted there

  // On the device.
  std::int64_t total() const { return parameters + masters + gradients + optimizer; }
};

struct MemoryOptions {
  int optimizer_states = 2;     // numbers per trained element, in its master's type; Adam has two moments
  std::int64_t tokens = 0;      // of one microbatch
  std::int64_t data_bytes = 0;  // of batches that are ready or in use
  // Ranks compute on the host: there is nothing to offload to, and parts of scattered gradients are received beside those
  // that are sent, as by Gloo.
  bool on_host = true;
  // On the host: attention in fp32 is our own. Torch's keeps its result twice.
  bool own_attention = true;
  // On the host: the CPU's library has convolutions in two bytes. Torch's own work otherwise.
  bool narrow_convolutions = false;
  int threads = 1;                   // on the host: of a rank
  std::int64_t workspace_bytes = 0;  // what libraries of a GPU work in
  bool copies_to_save = false;       // checkpoints are written from a copy, while training goes on
  bool learns_order = true;          // false: ranks agree on every gather, and none is ahead
  bool inputs_on_host = false;       // those of recomputed Units are kept there; REQUIRES: ranks compute elsewhere
  bool built_whole = false;          // the model is built before any of it is sharded, whatever comes and goes afterwards
};

// At the peak of a run: that of a step, from the third on, that of building the model, or that of the first step's end.
struct Memory {
  ModelState state{};
  std::int64_t gathered = 0;         // buffers for parameters of Units that are in
  std::int64_t whole_gradients = 0;  // buffers for gradients on their way to the ranks that keep a share of them
  std::int64_t communication = 0;    // compressed gradients, and what is received
  std::int64_t activations = 0;      // of one microbatch, with the gradients among them
  std::int64_t data = 0;             // batches, and the model's tables
  std::int64_t workspaces = 0;       // of libraries
  std::int64_t saving = 0;           // the copy that a checkpoint is written from
  std::int64_t building = 0;         // all that is held, at most, before the first step
  std::int64_t moving = 0;           // the same while parameters move to other buffers, when the first backward has ended

  std::int64_t step() const {
    return state.total() + gathered + whole_gradients + communication + activations + data + workspaces + saving;
  }
  std::int64_t total() const { return std::max({step(), building, moving}); }
};

// What a rank writes of a checkpoint: all ranks together write everything once, and each about as much.
BONFIRE_API std::int64_t saved_bytes(const std::vector<FlatLayout>& flats, const DataParallel& layout, int optimizer_states);
// Where a copy of it is held, it is added.
BONFIRE_API void hold_copy(Memory& memory, const std::vector<FlatLayout>& flats, const DataParallel& layout,
                           const MemoryOptions& options);
BONFIRE_API ModelState model_state(const std::vector<FlatLayout>& flats, const DataParallel& layout, int optimizer_states);
// What the reduction of one buffer over the replicas holds until backward has ended, or, with PowerSGD, for good.
BONFIRE_API std::int64_t compressed_bytes(const FlatLayout& flat, const DataParallel& layout);
BONFIRE_API Memory memory_of(const ModelDescription& model, const DataParallel& layout, const MemoryOptions& options);

// --- The tables people know: bytes of model state per parameter, in the limit of a large model, where padding is nothing.

struct PrecisionKind {
  const char* name;
  Dtype compute, master, gradient;
};

// fp32; mixed with gradients as forward makes them; mixed with gradients kept in fp32.
BONFIRE_API const std::vector<PrecisionKind>& precision_kinds();

struct BytesPerParameter {
  double parameters = 0, gradients = 0;
  double optimizer = 0;  // with the masters

  double total() const { return parameters + gradients + optimizer; }
};

// The rule of thumb of what activations need, per parameter, in a usual fp32 training.
inline constexpr double activations_per_parameter = 8;

BONFIRE_API BytesPerParameter bytes_per_parameter(const PrecisionKind& kind, const Factors& factors,
                                                  int optimizer_states = 2);

// How many times less model state a rank holds than a replica that shards nothing.
BONFIRE_API double reduction_factor(const PrecisionKind& kind, const Factors& factors, int optimizer_states = 2);

// --- What fits.

struct Fit {
  int shard = 1;
  Sharded what = Sharded::none;
  std::int64_t bytes = 0;  // of the whole peak
};

// The smallest sharding factor that divides the layout's ranks, and with it the least that must be sharded, so that a rank
// needs no more than `cap` bytes. Nothing where none does.
BONFIRE_API std::optional<Fit> smallest_fit(const ModelDescription& model, const DataParallel& layout,
                                            const MemoryOptions& options, std::int64_t cap);

// One line for a layout that needs more than `cap` bytes on a rank: how many it needs, and which factor would fit.
BONFIRE_API std::string does_not_fit(const ModelDescription& model, const DataParallel& layout, const MemoryOptions& options,
                                     std::int64_t cap);

}  // namespace bonfire::plan
