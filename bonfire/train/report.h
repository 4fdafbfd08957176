#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// What a run leaves behind, equal on all ranks.
struct TrainReport {
  std::string name;  // of the run
  std::string what;  // "llama, 1,234,567 parameters, 2 ranks on cpu, fp32"
  std::string run_folder;
  std::int64_t steps = 0;          // done
  std::int64_t skipped = 0;        // of them, without an update
  bool stopped = false;            // on request, before the last step
  std::string checkpoint{};        // the last one, with the weights; empty: there is none
  std::int64_t resumed_after = 0;  // the step that the run went on from; 0: it began with the first
  double loss_first = 0;           // of the first step since then
  double loss_last = 0;
  std::optional<double> entropy_floor{};
  std::optional<double> eval_loss{};   // the last evaluation's
  double tokens_per_second = 0;        // over all ranks, of the median step
  double step_ms = 0;                  // median, without the steps that set the run up; the mean where steps overlap
  std::int64_t peak_memory_bytes = 0;  // largest rank: what training added to the process before the model was built
  std::int64_t predicted_memory_bytes = 0;
  // Share of the steps in which the slowest rank waited for others. Nothing on GPUs, where the host does not wait.
  std::optional<double> exposed_communication{};
  // Where steps overlap: how often the pipeline ran empty, how long the slowest rank was at that, and the most updates
  // between the weights of a gradient and those that it changed, by stage.
  std::vector<int> staleness{};
  bool stash = true;
  std::int64_t drains = 0;
  double drain_seconds = 0;
  std::optional<double> seconds_lost_by_drain{};  // with filling again, beside a full pipeline
  // Saves while they overlap, and how long they held the slowest rank.
  struct Saves {
    std::int64_t count = 0;
    double seconds = 0;
    bool drained = true;  // before each
  } saves{};
  std::vector<std::string> server{};  // of a parameter server: what there is to say of its updates
  std::optional<double> mfu{};        // share of the GPU's peak that the model's own work is
};

BONFIRE_API std::string to_json(const TrainReport& report);
// A few lines for people.
BONFIRE_API std::string summary(const TrainReport& report);

}  // namespace bonfire
