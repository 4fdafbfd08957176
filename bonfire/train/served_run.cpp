#include "bonfire/train/served_run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/failure.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/stop_vote.h"
#include "bonfire/models/model.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/train/build.h"
#include "bonfire/train/engine_options.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/metrics.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/run_file.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/served_saving.h"

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

// What a server writes beside checkpoints: metrics, the progress line, and at the end the report. Rank 0's alone.
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

  // Says what an earlier life of this run has done since, where it is not done again alike.
  void begin_after(const ServedPlace& from) {
    first_ = from.updates + 1;
    metrics_.step = from.updates;
    step_start_ = now_ns();
    const auto earlier = last_step(options_.folder / "metrics.jsonl").value_or(0);
    if (together() || !options_.resume || world_.rank() != 0 || earlier <= from.updates) return;
    lost_updates_ = fmt::format("updates {} to {} ({}) were lost; samples from position {} on are trained again", first_,
                                earlier, earlier - from.updates, from.steps * config_.train.batch);
    world_.log().warning("{}", lost_updates_);
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

  // `workers_peak`: the largest that a worker has told of; 0: none has. `steps_done`: by those that are left.
  TrainReport finish(const ServerReport& served, const std::string& checkpoint, std::int64_t workers_peak,
                     std::int64_t steps_done) {
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
    if (!lost_updates_.empty()) report.server.push_back(lost_updates_);
    if (!served.dropped.empty())
      report.server.push_back(fmt::format("{} gradients came too late and were dropped", served.dropped.size()));
    for (const auto& lost : served.lost) {
      const auto batch = config_.train.batch, mine = batch / workers_;
      // A step of backup workers is an update.
      const auto step = config_.layout.server_backup > 0 ? lost.versions.front() + 1 : lost.step;
      const auto first = (step - 1) * batch + lost.worker * mine;
      auto words = fmt::format("worker {} (rank {}) was lost", lost.worker, config_.layout.server + lost.worker);
      if (step > steps_done)
        words += fmt::format(" after step {}: all its samples are in updates", step - 1);
      else
        words += fmt::format(
            ": its {} samples of steps {} to {} are in no update: positions {} to {} of the order, and {} later in each "
            "step that follows",
            (steps_done - step + 1) * mine, step, steps_done, first, first + mine - 1, batch);
      report.server.push_back(std::move(words));
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
  std::string lost_updates_;
  StepMetrics metrics_;
  std::vector<double> seconds_;
  std::unique_ptr<MetricsFile> file_;
  std::unique_ptr<ProgressLine> progress_;
};

// Steps of the run that are done: of the slowest worker, or updates where these do not wait for it.
std::int64_t steps_done(const Server& server, const Config& config) {
  return config.layout.server_backup > 0 ? server.version() : server.slowest();
}

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
  ServedSaving saving(servers, config, options);

  auto how = server_options_of(config, world.log());
  double lr = 0;
  std::int64_t voted = 0;
  Server* self = nullptr;
  const auto now = [&] { return ServedPlace{.steps = steps_done(*self, config), .updates = self->version()}; };
  how.before_update = [&](Optimizer& optimizer, std::int64_t update) {
    lr = learning_rate.at(together ? update : update / workers);
    optimizer.set_lr(lr);
  };
  how.after_update = [&](const ServerUpdate& update) -> std::int64_t {
    journal.note(update, lr);
    const auto place = now();
    // Servers are in the step of the slowest worker.
    while (options.stop && voted < place.steps && voted < config.train.steps - 1) options.stop->is_last(++voted);
    return saving.updated(place);
  };

  Server server(world, how, [&](Shares& shares) { return make_optimizer(shares, config); });
  self = &server;
  const auto no_more_saving = c10::make_scope_exit([&] { saving.abandon(); });
  const auto loaded = saving.load(server);
  const auto from = loaded.value_or(ServedPlace{});
  server.resume(from.updates, std::vector<std::int64_t>(static_cast<std::size_t>(workers), from.steps));
  voted = from.steps;
  journal.begin_after(from);
  if (loaded && world.rank() == 0) world.log().info("resumed after step {}", from.steps);
  saving.begin(server, from);

  const auto served = server.serve();
  const auto end = now();
  const auto checkpoint = saving.finish(end);
  std::int64_t peak = 0;
  for (int worker = 0; worker < workers; ++worker)
    if (const auto key = peak_of(worker); world.store().check({key})) peak = std::max(peak, world.store().add(key, 0));
  auto report = journal.finish(served, checkpoint, peak, end.steps);
  report.stopped = end.steps < config.train.steps;
  return report;
}

// REQUIRES: the step was taken with ServerOptions::skip_non_finite.
void require_finite(const ServedStep& taken, std::int64_t step) {
  if (taken.used || (std::isfinite(taken.number) && std::isfinite(taken.gradient_norm))) return;
  throw RunOver(fmt::format("step {}: {}; the run ends (train.nan_policy = stop, allowed: stop | skip)", step,
                            std::isfinite(taken.number) ? "the gradients are not finite, although the losses are"
                                                        : fmt::format("the loss is {}", taken.number)));
}

TrainReport work(const World& world, const Config& config, const TrainOptions& options) {
  const auto device =
      device_of(config, place_among_workers(world.rank(), world.local_rank(), static_cast<int>(config.layout.server)));
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
  if (options.may_be_lost) options.may_be_lost();
  // With backup workers a step is an update: who comes late to one goes on with the one that follows the newest.
  const bool follows = config.layout.server_backup > 0;
  std::int64_t done = follows && !worker.has_left() ? worker.report().version : worker.steps_before(), voted = done,
               loaded = 0;
  TrainReport report{.name = config.run.name, .run_folder = options.folder.string(), .steps = done};
  // While this worker was lost the others may have agreed to stop, and when.
  if (worker.is_back() && done < config.train.steps)
    report.stopped = worker.has_left() || (options.stop && options.stop->is_last(done));
  if (report.stopped) {
    worker.finish();
    return report;
  }
  while (done < config.train.steps && !report.stopped) {
    const auto step = done + 1;
    if (done != loaded) loader.seek(static_cast<std::uint64_t>(done * config.train.batch));
    loaded = step;
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
    const auto so_far = worker.report();
    if (config.train.nan_policy == "stop") require_finite(so_far, step);
    done = follows ? so_far.version : step;
    report.steps = done;
    world.progress()->finish_step(done);
    while (options.stop && voted < std::min(done, config.train.steps - 1))
      if (options.stop->is_last(++voted)) report.stopped = true;
  }
  world.store().add(peak_of(me), memory.peak());
  worker.finish();
  return report;
}

}  // namespace

int place_among_workers(int rank, int local_rank, int servers) {
  // The first ranks of all are servers, and those of a node are consecutive.
  const int first_of_node = rank - local_rank;
  return local_rank - std::clamp(servers - first_of_node, 0, local_rank);
}

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
