#include "bonfire/train/journal.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bonfire/base/size.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/progress.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/predict.h"

namespace bonfire {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// The first steps also set up buffers and connections: they tell nothing about the others. But something is reported,
// always.
std::vector<double> settled(const std::vector<double>& seconds, std::int64_t steps) {
  const auto left_out = std::min(steps, static_cast<std::int64_t>(seconds.size()) - 1);
  return left_out > 0 ? std::vector<double>(seconds.begin() + left_out, seconds.end()) : seconds;
}

std::string describe_run(const Run& run) {
  const auto& config = run.config;
  const auto model = plan::describe(config.model.spec);
  std::string text =
      fmt::format("{} with {} parameters, {} {} on {}, {}, {} samples a step", config.model.type,
                  format_count(model.parameter_elements()), run.world.size(), run.world.size() == 1 ? "rank" : "ranks",
                  run.world.device().str(), config.train.precision, config.train.batch);
  if (config.reads_tokens()) text += fmt::format(" of {} tokens", config.data.sequence);
  if (config.layout.shard > 1) text += fmt::format(", {} sharded over {}", config.layout.sharded, config.layout.shard);
  return text;
}

}  // namespace

Journal::Journal(const Run& run, const TrainOptions& options, std::int64_t first_step)
    : run_(run),
      folder_(options.folder),
      first_step_(first_step),
      written_from_(first_step),
      step_start_(now_ns()),
      disk_(run.config, run.world.log()) {
  metrics_.step = first_step - 1;
  if (run.world.rank() != 0) return;
  const auto config = folder_ / "config.toml";
  disk_.attempt(config, [&] { write_file(config, to_toml(run.config)); });
  if (options.progress) {
    auto progress = *options.progress;
    progress.steps = run.config.train.steps;
    progress.every = run.config.train.log_every;
    progress_ = std::make_unique<ProgressLine>(std::move(progress));
  }
}

void Journal::end_step(StepMetrics metrics, std::optional<double> taken) {
  const Nanoseconds now = now_ns();
  const double seconds = taken.value_or(static_cast<double>(now - step_start_) * 1e-9);
  step_start_ = now;
  step_seconds_.push_back(seconds);
  auto& board = *run_.world.progress();
  board.finish_step(metrics.step);
  const Progress progress = board.snapshot();
  if (step_seconds_.size() > 1) waited_seconds_ += std::clamp(progress.step_seconds - progress.own_seconds, 0.0, seconds);

  metrics_ = metrics;
  metrics_.tokens_per_second = static_cast<double>(run_.config.train.batch * run_.data.tokens_per_sample) / seconds;
  metrics_.memory_bytes = run_.memory.peak();
  if (metrics.step == first_step_) loss_first_ = metrics.loss;
}

void Journal::add_evaluation(double loss) {
  metrics_.eval_loss = eval_loss_ = loss;
  step_start_ = now_ns();
}

void Journal::write_metrics() {
  const auto path = folder_ / "metrics.jsonl";
  // Opened here, so that a file that could not be made is tried again.
  disk_.attempt(path, [&] {
    if (!file_) file_ = std::make_unique<MetricsFile>(path, written_from_);
    file_->write(metrics_);
  });
}

void Journal::write_events() {
  disk_.attempt(folder_ / "events.out.tfevents.*", [&] {
    if (!events_) events_ = std::make_unique<EventWriter>(folder_);
    events_->scalars(metrics_.step, {{"train/loss", metrics_.loss},
                                     {"train/grad_norm", metrics_.grad_norm},
                                     {"train/lr", metrics_.lr},
                                     {"train/tokens_per_second", metrics_.tokens_per_second},
                                     {"train/memory_bytes", static_cast<double>(metrics_.memory_bytes)},
                                     {"train/skipped", static_cast<double>(metrics_.skipped)}});
    if (metrics_.staleness) events_->scalars(metrics_.step, {{"train/staleness", *metrics_.staleness}});
    for (std::size_t stage = 0; stage < metrics_.stale_stages.size(); ++stage)
      events_->scalars(metrics_.step, {{fmt::format("train/staleness/stage_{}", stage),
                                        static_cast<double>(metrics_.stale_stages[stage])}});
    if (metrics_.eval_loss) events_->scalars(metrics_.step, {{"eval/loss", *metrics_.eval_loss}});
  });
}

void Journal::write_step() {
  if (run_.world.rank() == 0) {
    if (metrics_.step >= run_.config.train.steps) disk_.finish();
    write_metrics();
    write_events();
  }
  if (progress_) progress_->step_done(metrics_);
}

void Journal::go_back(std::int64_t step) {
  file_.reset();
  written_from_ = step + 1;
  step_start_ = now_ns();
}

TrainReport Journal::finish(const std::string& checkpoint, const TrainReport::Saves& saves) {
  progress_.reset();
  const auto& group = run_.world.group();
  const auto seconds = settled(step_seconds_, steps_to_settle(run_.config, run_.world.device()));
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  // Where steps overlap, replicas have some that take time and others that take none.
  const auto overlap = run_.trainee->overlap();
  const double step_seconds =
      group.max(overlap && !seconds.empty() ? total / static_cast<double>(seconds.size()) : median(seconds));
  const auto tokens = static_cast<double>(run_.config.train.batch * run_.data.tokens_per_sample);
  TrainReport report{.name = run_.config.run.name,
                     .what = describe_run(run_),
                     .run_folder = folder_.string(),
                     .steps = metrics_.step,
                     .skipped = metrics_.skipped,
                     .checkpoint = checkpoint,
                     .resumed_after = first_step_ - 1,
                     .loss_first = loss_first_,
                     .loss_last = metrics_.loss,
                     .entropy_floor = run_.data.entropy,
                     .eval_loss = eval_loss_,
                     .tokens_per_second = step_seconds > 0 ? tokens / step_seconds : 0,
                     .step_ms = 1e3 * step_seconds,
                     .peak_memory_bytes = static_cast<std::int64_t>(group.max(static_cast<double>(run_.memory.peak()))),
                     .predicted_memory_bytes = predict_memory(run_.config).total()};
  if (overlap) {
    report.staleness = overlap->staleness;
    report.stash = overlap->stash;
    report.drains = overlap->drains;
    report.drain_seconds = group.max(overlap->drain_seconds);
    if (overlap->seconds_lost) report.seconds_lost_by_drain = group.max(*overlap->seconds_lost);
    report.saves = saves;
    report.saves.seconds = group.max(saves.seconds);
  }
  // On a GPU it is the stream that waits, not the host: what is counted there says nothing.
  if (run_.world.device().is_cpu()) report.exposed_communication = group.max(total > 0 ? waited_seconds_ / total : 0);
  if (!run_.world.device().is_cpu()) {
    const GpuInfo gpu = gpu_info(run_.world.device().index());
    // Ranks that share a GPU share its peak.
    const int gpus = std::min(group.size(), gpu_count() * (group.size() / run_.world.local_size()));
    if (const auto peak = peak_flops(gpu.name, run_.config.train.precision)) {
      report.mfu = step_flops(run_.config) / (report.step_ms * 1e-3) / (*peak * gpus);
    }
  }
  if (group.rank() == 0) {
    disk_.finish();
    const auto path = folder_ / "report.json";
    disk_.attempt(path, [&] { write_file(path, to_json(report) + "\n"); });
  }
  return report;
}

}  // namespace bonfire
