#pragma once

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tests/random/engine_work.h"

// The oracle: plain torch on one rank, and optimizers as they are published.
namespace bonfire::cases {

using Weights = std::map<std::string, at::Tensor>;

// One optimizer over named parameters.
class PlainOptimizer {
 public:
  explicit PlainOptimizer(Update update) : update_(std::move(update)) {}

  // Uses and drops the gradients; returns their norm before clipping. `parameters`: by name, each once. What is frozen has
  // no state afterwards, and begins anew when it is thawed.
  double step(const std::map<std::string, at::Tensor>& parameters);

 private:
  struct State {
    std::int64_t steps = 0;
    at::Tensor first{}, second{}, largest{};
  };
  void update(at::Tensor parameter, at::Tensor gradient, State& state) const;

  Update update_;
  std::map<std::string, State> states_;
};

struct EventRecord {
  std::vector<std::vector<double>> losses;  // by rank, in the order of the backwards
  std::vector<at::Tensor> outputs;          // by rank, of evaluations
  double norm = std::numeric_limits<double>::quiet_NaN();
  Weights weights;  // afterwards, by name
  double tolerance = 0;
};

struct PlainRun {
  std::vector<EventRecord> events;
  Names names;
  std::string chosen;  // for options that name a parameter
};

PlainRun run_plainly(const EngineCase& each);

// By how much a tensor is away from what it should be, as a part of its size; values begin between 0.1 and 0.5.
double distance(const at::Tensor& is, const at::Tensor& should_be);
double distance(const Weights& are, const Weights& should_be);

// Each run is compared to this, or to so many times what the oracle makes of weights that are off by a few units in the last
// place: some cases are such that any rounding grows.
inline constexpr double least_tolerance = 1e-12, shaken = 1e-14, times_shaken = 30;

}  // namespace bonfire::cases
