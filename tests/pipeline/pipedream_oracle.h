#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "bonfire/pipeline/chain.h"

// A chain of Units, and what PipeDream's update equations make of it: in one process, version by version, with plain torch.
// It shares no code with pipelines, schedules or optimizers.
namespace bonfire::testing {

inline constexpr std::int64_t tower_width = 5;

// So many Units with a weight and a bias each; the last one returns the mean loss.
Chain tower(int units, at::Device device = at::kCPU);
// Of the minibatch: microbatches of different sizes.
std::vector<Microbatch> tower_minibatch(std::int64_t number, int microbatches, at::Device device = at::kCPU);

struct OracleRun {
  std::vector<int> units;     // of each stage
  std::vector<int> replicas;  // of each stage
  std::string mode = "pipedream";
  int microbatches = 1;  // of a minibatch
  bool weighed = false;  // Microbatch::weight, also 0
  bool stash = true;
  double lr = 0.05, momentum = 0.9;
  bool adam = false;
  double clip = 0;  // of each stage's gradient; 0: never
};

// That the run trains with.
std::vector<Microbatch> minibatch_of(const OracleRun& run, std::int64_t number, at::Device device = at::kCPU);

// Goes through minibatches in order.
class Oracle {
 public:
  explicit Oracle(OracleRun run);

  void train(std::int64_t minibatches);
  // What follows sees all updates: the pipeline has run empty.
  void drain();

  const std::vector<double>& losses() const { return losses_; }
  // Of each update of a stage, how many updates are between its gradient's weights and those it changes.
  const std::vector<int>& staleness(int stage) const { return staleness_[static_cast<std::size_t>(stage)]; }
  // The newest, by name.
  std::map<std::string, at::Tensor> weights() const;
  double loss_of(const std::vector<Microbatch>& microbatches) const;

 private:
  using Weights = std::vector<at::Tensor>;  // of a stage: weight and bias of each Unit
  std::int64_t version(int stage, std::int64_t minibatch) const;
  void update(std::size_t stage);

  OracleRun run_;
  std::vector<std::vector<Weights>> versions_;  // by stage and version
  std::vector<Weights> first_, second_;         // moments
  std::vector<Weights> gradients_;
  std::vector<int> gathered_, updates_, stalest_;
  std::vector<std::size_t> base_;  // the version that a pipeline that was empty began with
  std::int64_t number_ = 0, since_drain_ = 0;
  std::vector<double> losses_;
  std::vector<std::vector<int>> staleness_;
};

}  // namespace bonfire::testing
