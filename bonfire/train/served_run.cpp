#include "bonfire/train/served_run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/comm/stop_vote.h"
#include "bonfire/models/model.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/train/build.h"
#include "bonfire/train/engine_options.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/metrics.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/resume.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/run_file.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

LearningRate learning_rate_of_run(const Config& config) {
  const auto& o = config.optimizer;
  return {.peak = o.lr,
          .least = o.min_lr,
          .warmup = o.warmup,
          .steps = config.train.steps,
          .decay = o.decay == "cosine" ? Decay::cosine : (o.decay == "linear" ? Decay::linear : Decay::constant)};
}

// What a server writes: metrics, the progress line, checkpoints, and at the end the report. Rank 0's alone, but for the
// checkpoints, of which each server writes its part.
class ServedJournal {
 public:
  ServedJournal(const World& world, const Config& config, const TrainOptions& options)
      : world_(world),
        config_(config),
        options_(options),
        workers_(config.data_ranks()),
        memory_(c10::Device(c10::kCPU)),
        data_(open_data(config)),
        disk_(config, world.log()),
        step_start_(now_ns()) {
    if (world.rank() != 0) return;
    disk_.attempt(options.folder / "config.toml", [&] { write_file(options.folder / "config.toml", to_toml(config)); });
    if (!options.progress) return;
    auto progress = *options.progress;
    progress.steps = updates_of_run();
    progress.every = config.train.log_every;
    progress_ = std::make_unique<ProgressLine>(std::move(progress));
  }

  bool together() const { return config_.layout.server_mode == "synchronous"; }
  std::int64_t updates_of_run() const { return config_.train.steps * (together() ? 1 : workers_); }
  // Samples that an update has seen.
  std::int64_t samples_of_update() const { return together() ? config_.train.batch : config_.train.batch / workers_; }

  void begin_after(std::int64_t update) {
    first_ = update + 1;
    metrics_.step = update;
    step_start_ = now_ns();
  }

  void note(const ServerUpdate& update, double lr) {
    const auto now = now_ns();
    const double seconds = static_cast<double>(now - std::exchange(step_start_, now)) * 1e-9;
    seconds_.push_back(seconds);
    if (update.update == first_) loss_first_ = update.number;
    skipped_ += update.applied ? 0 : 1;
    metrics_ = {.step = update.update,
                .loss = update.number,
                .grad_norm = update.gradient_norm,
                .lr = lr,
                .tokens_per_second = static_cast<double>(samples_of_update() * data_.tokens_per_sample) / seconds,
                .memory_bytes = memory_.peak(),
                .skipped = skipped_,
                .staleness = update.staleness};
    world_.progress()->finish_step(update.update);
    if (world_.rank() != 0) return;
    disk_.attempt(options_.folder / "metrics.jsonl", [&] {
      if (!file_) file_ = std::make_unique<MetricsFile>(options_.folder / "metrics.jsonl", first_);
      file_->write(metrics_);
    });
    if (progress_) progress_->step_done(metrics_);
  }

  // `workers_peak`: the largest that a worker has told of; 0: none has.
  TrainReport finish(const ServerReport& served, const std::string& checkpoint, std::int64_t workers_peak) {
    progress_.reset();
    const auto how = served_of(config_);
    const auto flats = plan::served_flats(model_of(config_), served_worker_of(config_), how);
    const auto settled = seconds_.size() > 3 ? std::vector<double>(seconds_.begin() + 2, seconds_.end()) : seconds_;
    const double step = median_of(settled);
    const auto model = plan::describe(config_.model.spec);
    TrainReport report{
        .name = config_.run.name,
        .what = fmt::format("{} with {} parameters, {} worker{} and {} parameter server{}, {}, {}, {} samples a step",
                            config_.model.type, format_count(model.parameter_elements()), workers_, workers_ == 1 ? "" : "s",
                            config_.layout.server, config_.layout.server == 1 ? "" : "s", config_.layout.server_mode,
                            config_.train.precision, config_.train.batch),
        .run_folder = options_.folder.string(),
        .steps = metrics_.step,
        .skipped = skipped_,
        .checkpoint = checkpoint,
        .loss_first = loss_first_,
        .loss_last = metrics_.loss,
        .entropy_floor = data_.entropy,
        .tokens_per_second = step > 0 ? static_cast<double>(samples_of_update() * data_.tokens_per_sample) / step : 0,
        .step_ms = 1e3 * step,
        .peak_memory_bytes = workers_peak > 0 ? workers_peak : memory_.peak(),
        .predicted_memory_bytes = predict_memory(config_).total()};
    report.server.push_back(fmt::format("{} updates, staleness {:.2f} in the mean and {} at most", served.updates,
                                        served.mean_stale, served.most_stale));
    report.server.push_back(fmt::format("{} of state predicted, {} measured at the peak of this server",
                                        format_bytes(plan::server_state_bytes(flats, how)), format_bytes(memory_.peak())));
    if (!served.dropped.empty())
      report.server.push_back(fmt::format("{} gradients came too late and were dropped", served.dropped.size()));
    for (const auto& lost : served.lost) {
      const auto mine = config_.train.batch / workers_, first = (lost.step - 1) * config_.train.batch + lost.worker * mine;
      report.server.push_back(fmt::format(
          "worker {} was lost: its samples from step {} on (positions {} to {} of the order, and so on) are in no "
          "update",
          lost.worker, lost.step, first, first + mine - 1));
    }
    if (world_.rank() == 0) {
      disk_.finish();
      const auto path = options_.folder / "report.json";
      disk_.attempt(path, [&] { write_file(path, to_json(report) + "\n"); });
    }
    return report;
  }

 private:
  World world_;
  const Config& config_;
  const TrainOptions& options_;
  std::int64_t workers_;
  MemoryMeter memory_;
  RunData data_;
  DiskPolicy disk_;
  Nanoseconds step_start_;
  std::int64_t first_ = 1, skipped_ = 0;
  double loss_first_ = 0;
  StepMetrics metrics_;
  std::vector<double> seconds_;
  std::unique_ptr<MetricsFile> file_;
  std::unique_ptr<ProgressLine> progress_;
};

// Where a run is: as the loader of any other run says it.
class ServedPosition final : public Stateful {
 public:
  ServedPosition(const Server& server, const Config& config) : server_(server), config_(config) {}

  State save() const override {
    const auto steps = server_.steps();
    const auto slowest = *std::min_element(steps.begin(), steps.end());
    return {{"samples", slowest * config_.train.batch}, {"skipped", std::int64_t{0}}};
  }
  void load(const State& state) override { step = state_value<std::int64_t>(state, "samples") / config_.train.batch; }

  std::int64_t step = 0;  // that was loaded

 private:
  const Server& server_;
  const Config& config_;
};

// Where a worker says how much memory it has needed.
std::string peak_of(int worker) { return fmt::format("peak memory of worker {}", worker); }

TrainReport serve(const World& world, const Config& config, const TrainOptions& options) {
  ServedJournal journal(world, config, options);
  const auto learning_rate = learning_rate_of_run(config);
  const auto workers = config.data_ranks();
  const bool together = journal.together();
  // Of the servers alone: a worker that is gone must not hold up a checkpoint.
  const auto servers = World::from_store(
      c10::make_intrusive<c10d::PrefixStore>("the servers", c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store())),
      world.rank(), static_cast<int>(config.layout.server), server_options_of(config, world.log()).connection);
  std::unique_ptr<Checkpoints> checkpoints;
  const auto& keys = config.checkpoint;
  const auto every = config.layout.server_save_every > 0 ? config.layout.server_save_every : keys.every;
  const auto folder = checkpoints_of(options.folder);
  if (world.rank() == 0)
    world.log().info("weights: {}", every == 0
                                        ? "not kept: checkpoint.every = 0"
                                        : fmt::format("saved every {} steps and at the end, in {}", every, folder.string()));
  if (every > 0 || options.resume)
    checkpoints = std::make_unique<Checkpoints>(
        servers, folder,
        CheckpointOptions{.keep = static_cast<int>(keys.keep),
                          .asynchronous = keys.asynchronous,
                          .busy = keys.busy == "skip" ? WhenBusy::skip : WhenBusy::wait,
                          .failed = keys.failed == "stop" ? WhenFailed::stop : WhenFailed::warn,
                          .configuration = to_toml(config)});

  auto how = server_options_of(config, world.log());
  double lr = 0;
  std::int64_t voted = 0;
  Server* self = nullptr;
  std::unique_ptr<ServedPosition> position;
  const auto contents = [&] { return CheckpointContents{.tensors = {self}, .states = {{"run", position.get()}}}; };
  how.before_update = [&](Optimizer& optimizer, std::int64_t update) {
    lr = learning_rate.at(together ? update : update / workers);
    optimizer.set_lr(lr);
  };
  how.after_update = [&](const ServerUpdate& update) -> std::int64_t {
    journal.note(update, lr);
    const auto steps = self->steps();
    const auto slowest = *std::min_element(steps.begin(), steps.end());
    // Servers are in the step of the slowest worker.
    while (options.stop && voted < slowest && voted < config.train.steps - 1) options.stop->is_last(++voted);
    if (together && checkpoints && every > 0 && update.update % every == 0 && update.update < config.train.steps)
      checkpoints->save(update.update, contents());
    return checkpoints ? checkpoints->last_saved().value_or(0) : 0;
  };

  Server server(world, how, [&](Shares& shares) { return make_optimizer(shares, config); });
  self = &server;
  position = std::make_unique<ServedPosition>(server, config);
  const auto begin_with = [&](std::int64_t step) {
    server.resume(together ? step : step * workers, std::vector<std::int64_t>(static_cast<std::size_t>(workers), step));
    voted = step;
    journal.begin_after(together ? step : step * workers);
  };
  std::optional<std::int64_t> loaded;
  if (options.resume) loaded = checkpoints->load_latest(contents());
  if (!loaded && !options.begin_with.empty()) loaded = load_checkpoint(servers, options.begin_with, contents());
  if (loaded) begin_with(position->step);
  if (loaded && world.rank() == 0) world.log().info("resumed after step {}", position->step);

  const auto served = server.serve();
  std::string checkpoint;
  if (checkpoints && every > 0) {
    const auto steps = server.steps();
    const auto last = *std::min_element(steps.begin(), steps.end());
    checkpoints->finish();
    if (checkpoints->last_saved() != last) checkpoints->save_now(last, contents());
    checkpoints->finish();
    if (const auto saved = checkpoints->last_saved()) checkpoint = (folder / checkpoint_name(*saved)).string();
  }
  std::int64_t peak = 0;
  for (int worker = 0; worker < workers; ++worker)
    if (const auto key = peak_of(worker); world.store().check({key})) peak = std::max(peak, world.store().add(key, 0));
  auto report = journal.finish(served, checkpoint, peak);
  const auto steps = server.steps();
  report.stopped = *std::min_element(steps.begin(), steps.end()) < config.train.steps && served.lost.empty();
  return report;
}

TrainReport work(const World& world, const Config& config, const TrainOptions& options) {
  const auto device = device_of(config, std::max(0, world.local_rank() - static_cast<int>(config.layout.server)));
  const ComputeStream stream(device);
  const MemoryMeter memory(device);
  const auto alone = World::from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.device = device});
  const auto data = open_data(config);
  const int me = world.rank() - static_cast<int>(config.layout.server);
  const auto workers = static_cast<int>(config.data_ranks());
  auto model = build_model(model_of(config, 0), build_options(config, alone, alone.mesh({})));
  prepare_blocks(*model, config);
  auto shard = engine_options(config, world.log(), 0);
  shard.reduction = {};
  Worker worker(world, *model, server_options_of(config, world.log()), std::move(shard));
  Loader loader(data.train, {.batch = config.train.batch,
                             .microbatch = config.train.microbatch,
                             .rank = me,
                             .ranks = workers,
                             .seed = static_cast<std::uint64_t>(config.train.seed),
                             .pin_memory = !device.is_cpu()});
  const auto before = worker.steps_before();
  loader.seek(static_cast<std::uint64_t>(before * config.train.batch));
  TrainReport report{.name = config.run.name, .run_folder = options.folder.string(), .steps = before};
  for (std::int64_t step = before + 1; step <= config.train.steps; ++step) {
    auto batches = loader.next();
    require(batches && !batches->microbatches.empty(), "the data ended after {} samples", loader.samples_taken());
    const auto count = batches->microbatches.size();
    auto first_sample = me * (config.train.batch / workers);
    double sum = 0;
    for (std::size_t at = 0; at < count; ++at) {
      const auto& batch = batches->microbatches[at];
      model->set_dropout(static_cast<std::uint64_t>(step), first_sample);
      first_sample += batch.input.size(0);
      const auto loss = model->loss(batch.input.to(device), batch.target.to(device));
      const auto part = loss / static_cast<double>(count);
      at + 1 < count ? worker.accumulate(part) : worker.backward(part);
      sum += loss.item<double>();
    }
    worker.step(sum / static_cast<double>(count));
    report.steps = step;
    world.progress()->finish_step(step);
    const auto so_far = worker.report();
    if (!so_far.used && !std::isfinite(so_far.number) && config.train.nan_policy == "stop")
      fail("step {}: the loss is {}; the run ends (train.nan_policy = stop, allowed: stop | skip)", step, so_far.number);
    if (options.stop && step < config.train.steps && options.stop->is_last(step)) {
      report.stopped = true;
      break;
    }
  }
  world.store().add(peak_of(me), memory.peak());
  worker.finish();
  return report;
}

}  // namespace

ServerOptions server_options_of(const Config& config, const Log& log) {
  const auto& layout = config.layout;
  ServerOptions options{.servers = static_cast<int>(layout.server),
                        .mode = layout.server_mode == "synchronous" ? ServerMode::synchronous
                                : layout.server_mode == "bounded"   ? ServerMode::bounded
                                                                    : ServerMode::asynchronous,
                        .staleness = static_cast<int>(layout.server_staleness),
                        .backup = static_cast<int>(layout.server_backup),
                        .lost = layout.server_lost == "stop"   ? WhenLost::stop
                                : layout.server_lost == "drop" ? WhenLost::drop
                                                               : WhenLost::wait,
                        .clip = config.train.clip,
                        .clip_value = config.train.clip_value,
                        .skip_non_finite = true,
                        .log = log};
  if (layout.compression == "bf16") options.compression = plan::Compression::bf16;
  if (layout.compression == "fp16") options.compression = plan::Compression::fp16;
  options.connection.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.run.timeout * 1e3));
  return options;
}

TrainReport train_served(const World& world, const Config& config, const TrainOptions& options) {
  return world.rank() < config.layout.server ? serve(world, config, options) : work(world, config, options);
}

}  // namespace bonfire
