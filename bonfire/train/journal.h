#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "bonfire/train/build.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/metrics.h"
#include "bonfire/train/progress.h"
#include "bonfire/train/run_file.h"
#include "bonfire/train/tensorboard.h"

namespace bonfire {

// Keeps the time of the steps, and on rank 0 writes what a run leaves behind and shows.
class Journal {
 public:
  Journal(const Run& run, const TrainOptions& options);

  // The step's own work is done: its time ends here, and the next one's begins. So writing is part of a step's time.
  void end_step(StepMetrics metrics, bool skipped);
  // Evaluation is not: the next step's time begins here instead.
  void add_evaluation(double loss);
  // Writes what the two have noted.
  void write_step();

  // Collective.
  TrainReport finish();

 private:
  const Run& run_;
  std::filesystem::path folder_;
  StepMetrics metrics_;
  double loss_first_ = 0;
  std::optional<double> eval_loss_;
  Nanoseconds step_start_;
  std::vector<double> step_seconds_;
  double waited_seconds_ = 0;

  // Rank 0 only.
  void write_metrics();
  void write_events();
  DiskPolicy disk_;
  std::unique_ptr<MetricsFile> file_;
  std::unique_ptr<EventWriter> events_;
  std::unique_ptr<ProgressLine> progress_;
};

}  // namespace bonfire
