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
  // `first_step` is the first that will end: a run that goes on writes the later ones again.
  Journal(const Run& run, const TrainOptions& options, std::int64_t first_step);

  // The step's own work is done: its time ends here, and the next one's begins. So writing is part of a step's time.
  // `seconds`: instead of the time since the one before.
  void end_step(StepMetrics metrics, std::optional<double> seconds = {});
  // Evaluation is not: the next step's time begins here instead.
  void add_evaluation(double loss);
  // Writes what the two have noted.
  void write_step();
  std::int64_t step() const { return metrics_.step; }  // that ended last
  // The run has gone back: steps behind this one are taken, and written, again.
  void go_back(std::int64_t step);

  // `checkpoint` is the last one, if any; `saves` are those on the way there. Collective.
  TrainReport finish(const std::string& checkpoint, const TrainReport::Saves& saves);

 private:
  const Run& run_;
  std::filesystem::path folder_;
  std::int64_t first_step_;
  std::int64_t written_from_;  // what is written before this step stays
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
