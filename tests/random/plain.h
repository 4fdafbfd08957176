#pragma once

#include <algorithm>
#include <cmath>
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
  std::string chosen;        // for options that name a parameter
  std::size_t left_out = 0;  // events that cannot be compared
};

PlainRun run_plainly(const EngineCase& each);

// By how much a tensor is away from what it should be, as a part of its size; values begin between 0.1 and 0.5.
double distance(const at::Tensor& is, const at::Tensor& should_be);
double distance(const Weights& are, const Weights& should_be);

// Each run is compared to this, or to so many times what the oracle makes of weights that are off by a few units in the last
// place: some cases are such that any rounding grows. An event that grows it beyond all bounds would pass with anything:
// it is left out, and so is what comes after it.
inline constexpr double least_tolerance = 1e-12, shaken = 1e-14, times_shaken = 30, most_tolerance = 1e-9;

// Writes that tolerance into the records of a run. `compare(record, of_shaken, look)` calls look(distance) for each of the
// numbers that a record has; what was off once stays so. Returns how many were left out.
template <class Record, class Compare>
std::size_t set_tolerances(std::vector<Record>& records, const std::vector<Record>& of_shaken, const Compare& compare) {
  double worst = 0;
  const auto look = [&](double away) { worst = std::max(worst, std::isfinite(away) ? away : 0); };
  for (std::size_t at = 0; at < records.size(); ++at) {
    compare(records[at], of_shaken[at], look);
    look(distance(of_shaken[at].weights, records[at].weights));
    look(std::abs(of_shaken[at].norm - records[at].norm) / std::max(0.1, records[at].norm));
    records[at].tolerance = std::max(times_shaken * worst, least_tolerance);
    if (records[at].tolerance <= most_tolerance) continue;
    const std::size_t all = records.size();
    records.erase(records.begin() + static_cast<int>(at), records.end());
    return all - at;
  }
  return 0;
}

}  // namespace bonfire::cases
