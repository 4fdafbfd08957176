#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/memory.h"
#include "bonfire/plan/server.h"
#include "bonfire/train/config.h"

namespace bonfire {

namespace plan {
struct PipelineLayout;
}

// The data-parallel part of the layout in plan's words. REQUIRES: config is resolved.
BONFIRE_API plan::DataParallel data_parallel_of(const Config& config);
// The stages of a pipeline and their table in plan's words. REQUIRES: layout.pipeline is 2 or more, and a schedule of
// flushes.
BONFIRE_API plan::PipelineLayout pipeline_layout_of(const Config& config);
// With parameter servers: what plan knows of them, and one of their workers as layout arithmetic sees it, a rank alone.
BONFIRE_API plan::Served served_of(const Config& config);
BONFIRE_API plan::DataParallel served_worker_of(const Config& config);
// What else the memory of a rank depends on.
BONFIRE_API plan::MemoryOptions memory_options_of(const Config& config);

// Bytes that a rank holds at the peak of a step, from the configuration alone.
BONFIRE_API plan::Memory predict_memory(const Config& config);

// A stage of PipeDream's, on each of its ranks.
struct PredictedStage {
  int first_unit = 0, units = 0;
  int replicas = 1;
  int in_flight = 1;      // minibatches whose backward has not ended; with 2BW and flush, microbatches
  int versions = 1;       // of its weights
  plan::Memory memory{};  // parameters are those of all versions
};
// REQUIRES: the configuration runs PipeDream.
BONFIRE_API std::vector<PredictedStage> predict_stages(const Config& config);
// The same model as data parallelism on as many ranks, with batches of as many of its microbatches as every rank needs.
BONFIRE_API Config beside_data_parallel(const Config& config);

// Floating-point operations of forward and backward of one whole batch, recomputation not counted.
BONFIRE_API double step_flops(const Config& config);

// The most floating-point operations a second that a GPU of this name does in this precision, as its maker says (dense
// products); nothing where we do not know it.
BONFIRE_API std::optional<double> peak_flops(const std::string& gpu, const std::string& precision);

}  // namespace bonfire
