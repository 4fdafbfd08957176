#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// What a run leaves behind, equal on all ranks.
struct TrainReport {
  std::string name;  // of the run
  std::string what;  // "llama, 1,234,567 parameters, 2 ranks on cpu, fp32"
  std::string run_folder;
  std::int64_t steps = 0;    // done
  std::int64_t skipped = 0;  // of them, without an update
  double loss_first = 0;
  double loss_last = 0;
  std::optional<double> entropy_floor{};
  std::optional<double> eval_loss{};   // the last evaluation's
  double tokens_per_second = 0;        // over all ranks, of the median step
  double step_ms = 0;                  // median, without the steps that set the run up
  std::int64_t peak_memory_bytes = 0;  // largest rank: what training added to the process before the model was built
  std::int64_t predicted_memory_bytes = 0;
  // Share of the steps in which the slowest rank waited for others. Nothing on GPUs, where the host does not wait.
  std::optional<double> exposed_communication{};
  std::optional<double> mfu{};  // share of the GPU's peak that the model's own work is
};

// Whether and where a run keeps the weights that it trains.
inline constexpr const char* weights_kept = "not kept: this version writes no checkpoints";

BONFIRE_API std::string to_json(const TrainReport& report);
// A few lines for people.
BONFIRE_API std::string summary(const TrainReport& report);

}  // namespace bonfire
