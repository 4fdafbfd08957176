#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/memory.h"
#include "bonfire/plan/model.h"
#include "bonfire/plan/step_events.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire::plan {

// Units [begin, end) of a model's chain.
struct StageUnits {
  int begin = 0;
  int end = 0;
};

// A model over a pipeline of data-parallel ranks.
struct PipelineLayout {
  schedule::Schedule table{};           // with every cell that runs
  std::vector<StageUnits> stages{};     // in order
  std::vector<std::int64_t> samples{};  // of each microbatch
  std::int64_t tokens = 1;              // of a sample, on a rank
  DataParallel data{};                  // of each stage; `microbatches` and what seams decide do not count
  int reports = 1;                      // numbers that the last stage makes known: the loss, and what comes with it
  bool weighs = false;                  // microbatches have weights: their sum over the data-parallel ranks is one more
  // Microbatches after which a gradient that was sent to the stage before has been received; 0: known at the end of the step.
  int sent_window = 0;
  bool gathers_units = false;           // sharded parameters are gathered Unit by Unit, not stage by stage
};

// The Units of a stage as a model of its own.
BONFIRE_API ModelDescription stage_model(const ModelDescription& model, const PipelineLayout& layout, int stage);
// The flat buffers of a stage, in the order in which its backward finishes them.
BONFIRE_API std::vector<FlatLayout> flats_of_stage(const ModelDescription& model, const PipelineLayout& layout, int stage);

// Whether something is trained before it, so that a gradient of what comes in is wanted.
BONFIRE_API bool trains_before(const ModelDescription& model, const PipelineLayout& layout, int stage);
// Its Units in forward order, over these buffers. Those run in a backward that have something trained in them, or before
// them, on whatever stage.
BONFIRE_API std::vector<StepUnit> units_of_stage(const ModelDescription& model, const PipelineLayout& layout, int stage,
                                                 const std::vector<FlatLayout>& flats);
// Of each computation of a stage in its rank's row, whether it is a backward.
BONFIRE_API std::vector<bool> backwards_of_stage(const PipelineLayout& layout, int stage);

// Bytes of what stage `stage` hands to the next for one microbatch; its gradient has as many.
BONFIRE_API std::int64_t crossing_bytes(const ModelDescription& model, const PipelineLayout& layout, int stage,
                                        int microbatch);

// Every collective and message of one optimizer step of a pipeline rank, from the second step on. Messages are in the order
// in which the rank issues them, and so are gathers; reductions over replicas begin when those over shards have ended, so
// their places in the list are not exact.
BONFIRE_API std::vector<Collective> collectives_of_step(const ModelDescription& model, const PipelineLayout& layout,
                                                        int rank);

// The peak of a pipeline rank, or of the rank that needs most. `options.tokens` does not count.
BONFIRE_API Memory memory_of(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options,
                             int rank);
BONFIRE_API Memory memory_of(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options);

}  // namespace bonfire::plan
