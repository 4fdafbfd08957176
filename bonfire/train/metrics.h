#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/train/run_file.h"

namespace bonfire {

// What is known about a step once it is done, the same on all ranks.
struct StepMetrics {
  std::int64_t step = 0;
  double loss = 0;  // mean over the whole batch
  double grad_norm = 0;
  double lr = 0;
  double tokens_per_second = 0;
  std::int64_t memory_bytes = 0;      // peak so far of the rank that writes
  std::int64_t skipped = 0;           // updates left out so far
  std::optional<double> staleness{};  // of the weights of a gradient, in updates: where steps overlap the most of any stage
  std::vector<int> stale_stages{};    // the same by stage
  std::optional<double> eval_loss{};  // on held-out data, in the steps that evaluate
};

// One line of metrics.jsonl, without its end. Numbers keep every bit of a double; what is not finite is null.
BONFIRE_API std::string to_json(const StepMetrics& metrics);

// The last step that such a file speaks of; nothing where there is no line, or no file.
BONFIRE_API std::optional<std::int64_t> last_step(const std::filesystem::path& path);

// The file metrics.jsonl: one object a step, on the disk as soon as it is written.
class BONFIRE_API MetricsFile {
 public:
  // Goes on behind the steps before `first_step`: a run that was resumed writes the later ones again. A line that was cut
  // short when the run died is dropped. Throws WriteError, as write() does.
  explicit MetricsFile(const std::filesystem::path& path, std::int64_t first_step = 0);
  void write(const StepMetrics& metrics);

 private:
  RunFile file_;
};

}  // namespace bonfire
