#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/world.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/plan/model.h"

// Tiny models trained through a pipeline, and the same by plain torch on one rank: the oracle, which shares no code with it.
namespace bonfire::testing {

struct ChainOptions {
  at::ScalarType dtype = at::kDouble;
  at::Device device = at::kCPU;
  plan::Recompute recompute = plan::Recompute::none;
};
// One of our models as a chain of Units.
Chain chain_of_model(const plan::ModelSpec& spec, const ChainOptions& options);

struct PipelineRun {
  plan::ModelSpec spec{};
  MeshShape shape{};
  std::string schedule = "1f1b";
  int microbatches = 4;
  int chunks = 1;
  int steps = 2;
  std::vector<std::int64_t> sizes{};  // of the microbatches of a pipeline; empty: tiny_samples, as evenly as can be
  double clip = 1;
  at::ScalarType dtype = at::kDouble;
  std::optional<at::ScalarType> compute{};
  bool scaled = false;
  ShardOptions shard{};
  plan::Recompute recompute = plan::Recompute::none;
  std::optional<schedule::Schedule> table{};  // instead of `schedule`
};

struct PipelineOutcome {
  std::vector<double> losses;                 // of the whole batch, by step
  std::map<std::string, at::Tensor> weights;  // of this rank's stages, whole, in fp64
  double evaluated = 0;                       // mean loss of the last step's batch after all steps
  std::vector<schedule::Action> executed;     // in the last step
  std::vector<schedule::Action> row;          // this rank's of the table
  int peak_activations = 0;
};

// Collective: trains with AdamW and clipping. REQUIRES: world.size() is the shape's.
PipelineOutcome train_pipeline(const World& world, const PipelineRun& run);
// The same samples on one rank. Its layout is ignored but for the data-parallel ranks, whose samples it all has.
PipelineOutcome train_plainly(const PipelineRun& run);

// Weights and losses of a rank of a pipeline are those of the oracle.
void expect_parity(const PipelineOutcome& pipeline, const PipelineOutcome& plain, double tolerance = 1e-12);

}  // namespace bonfire::testing
