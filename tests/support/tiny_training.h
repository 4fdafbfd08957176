#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/world.h"
#include "bonfire/plan/model.h"
#include "bonfire/shard/engine.h"

// Models small enough to be trained many times over in a test, and one way to train them on any number of ranks.
namespace bonfire::testing {

struct TinyModel {
  const char* name;
  plan::ModelSpec spec;
};

// Every kind of model, with tied weights, grouped heads and dropout among them.
const std::vector<TinyModel>& tiny_models();

inline constexpr std::int64_t tiny_samples = 48;  // in a step: 1, 2, 3 and 4 ranks with 4 microbatches each divide it

// Input and target of samples [begin, begin + count) of a step.
std::pair<at::Tensor, at::Tensor> tiny_data(const plan::ModelSpec& spec, int step, std::int64_t begin, std::int64_t count);

struct TinyRun {
  plan::ModelSpec spec;
  int accumulation = 1;
  int steps = 3;
  at::ScalarType dtype = at::kDouble;
  std::optional<at::ScalarType> compute{};
  bool scaled = false;  // with a gradient scaler
  bool frozen = false;  // every second parameter
  int factor = 1;       // the sharding factor; must divide the ranks
  plan::Recompute recompute = plan::Recompute::none;
  int recompute_every = 1;
  ShardOptions options{};
};

struct TinyOutcome {
  std::vector<double> losses;  // of the whole batch, by step
  at::Tensor weights;          // all of them in a row, in fp64 on the CPU
};

// Collective: trains with AdamW, clipping and small buckets on all ranks of `world`.
TinyOutcome train_tiny(const World& world, const TinyRun& run);

// |a - b| / |b|
double relative_distance(const at::Tensor& a, const at::Tensor& b);

}  // namespace bonfire::testing
