#pragma once

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipedream.h"
#include "tests/pipeline/pipedream_oracle.h"

// What the oracle computes, trained by a pipeline.
namespace bonfire::testing {

inline schedule::RoundRobin robin_of(const OracleRun& run) {
  return {.replicas = run.replicas, .mode = schedule::weight_mode(run.mode).value(), .microbatches = run.microbatches};
}

// One Unit a stage, but two for the last.
inline OracleRun run_of(std::vector<int> replicas, schedule::WeightMode mode, int microbatches = 0) {
  OracleRun run{.units = std::vector<int>(replicas.size(), 1), .replicas = replicas, .mode = std::string(name_of(mode))};
  run.units.back() = 2;
  run.microbatches =
      microbatches > 0 ? microbatches : schedule::endless_shape({.replicas = replicas, .mode = mode}).microbatches;
  return run;
}

struct Trained {
  std::unique_ptr<PipeDream> pipeline;
  std::unique_ptr<Optimizer> optimizer;
  std::vector<StageUpdate> updates;
  std::int64_t minibatches = 0;
  std::function<void(const StageUpdate&)> after_update = nullptr;
  at::Device device;

  Trained(const World& world, const OracleRun& run, at::Device on = at::kCPU) : device(on) {
    const int units = std::accumulate(run.units.begin(), run.units.end(), 0);
    std::vector<UnitRange> stages;
    for (int begin = 0; const int count : run.units) {
      stages.push_back({begin, begin + count});
      begin += count;
    }
    pipeline = std::make_unique<PipeDream>(
        world.mesh({.pipeline = world.size()}), tower(units, device),
        PipeDreamOptions{
            .robin = robin_of(run), .stages = stages, .stash = run.stash, .example = tower_minibatch(0, 1, device)[0]});
    if (run.adam)
      optimizer = std::make_unique<Adam>(*pipeline, AdamOptions{.lr = run.lr});
    else
      optimizer = std::make_unique<Sgd>(*pipeline, SgdOptions{.lr = run.lr, .momentum = run.momentum});
    pipeline->on_update([this, clip = run.clip](const StageUpdate& update) {
      updates.push_back(update);
      optimizer->step({.clip = clip});
      if (after_update) after_update(update);
    });
  }

  void train(const OracleRun& run, std::int64_t count) {
    for (const auto end = minibatches + count; minibatches < end; ++minibatches)
      pipeline->admit(minibatch_of(run, minibatches, device));
  }
};

// Of the newest weights of this rank's stage. REQUIRES: nothing is on its way.
inline void expect_weights(PipeDream& pipeline, const Oracle& oracle) {
  const auto expected = oracle.weights();
  const auto whole = pipeline.engine().full_parameters();
  for (const auto& item : pipeline.module().named_parameters()) {
    const auto& other = expected.at(item.key());
    EXPECT_LT((item.value().cpu() - other).norm().item<double>(), 1e-12 * other.norm().item<double>())
        << item.key() << " of stage " << pipeline.stage();
  }
}

}  // namespace bonfire::testing
