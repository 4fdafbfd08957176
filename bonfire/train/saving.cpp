#include "bonfire/train/saving.h"

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/shard/selected_slices.h"
#include "bonfire/train/adapters.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/resume.h"
#include "bonfire/train/weights.h"

namespace bonfire {

// Where the run is in its data, and what else outlives a step.
class Saving::Position final : public Stateful {
 public:
  explicit Position(Run& run) : run_(run) {}

  State save() const override {
    State state = run_.loader.save();
    state.emplace("skipped", run_.skipped);
    if (run_.scaler)
      for (auto& [name, value] : run_.scaler->save()) state.emplace("scaler." + name, std::move(value));
    return state;
  }
  // A run in another precision has no scaler, or a fresh one.
  void load(const State& state) override {
    State scaler;
    constexpr std::string_view prefix = "scaler.";
    for (const auto& [name, value] : state)
      if (name.starts_with(prefix)) scaler.emplace(name.substr(prefix.size()), value);
    run_.loader.load(state);
    if (state.contains("skipped")) run_.skipped = state_value<std::int64_t>(state, "skipped");
    if (run_.scaler && !scaler.empty()) run_.scaler->load(scaler);
  }

 private:
  Run& run_;
};

Saving::Saving(Run& run, const TrainOptions& options)
    : run_(run), options_(options), folder_(checkpoints_of(options.folder)), position_(std::make_unique<Position>(run)) {
  const auto& keys = run.config.checkpoint;
  if (run.world.rank() == 0 && !options.is_measurement)
    run.world.log().info("weights: {}", keys.every == 0 ? "not kept: checkpoint.every = 0"
                                                        : fmt::format("saved every {} steps and at the end, in {}",
                                                                      keys.every, folder_.string()));
  begin_with_base();
  if (keys.every == 0 && !options.resume) return;
  checkpoints_ =
      std::make_unique<Checkpoints>(run.world, folder_,
                                    CheckpointOptions{.keep = static_cast<int>(keys.keep),
                                                      .asynchronous = keys.asynchronous,
                                                      .busy = keys.busy == "skip" ? WhenBusy::skip : WhenBusy::wait,
                                                      .failed = keys.failed == "stop" ? WhenFailed::stop : WhenFailed::warn,
                                                      .configuration = to_toml(run.config)});
  saves_.drained = keys.drain;
  if (!keys.drain) run.trainee->on_step_made([this](std::int64_t step) { contribute(step); });
}

CheckpointContents Saving::contents() {
  if (!base_) return {.tensors = run_.trainee->state(), .states = {{"run", position_.get()}}};
  CheckpointContents contents{.tensors = {}, .states = {{"run", position_.get()}, {base_state, base_.get()}}};
  for (const auto& selected : selected_) contents.tensors.push_back(selected.get());
  return contents;
}

// What adapters are over is not in their checkpoints: it is there before anything else is loaded.
void Saving::begin_with_base() {
  const auto& config = run_.config;
  if (!has_adapters(config)) return;
  check_adapters(config);
  load_weights(run_);
  if (config.checkpoint.weights.empty()) return;
  base_ = std::make_unique<BaseWeights>(run_.world, checkpoint_of_weights(config));
  for (Sliced* const state : run_.trainee->state())
    selected_.push_back(std::make_unique<SelectedSlices>(*state, [](const std::string& name, const std::string& kind) {
      return (kind != "value" && kind != "buffer") || plan::is_adapter(name);
    }));
}

std::int64_t Saving::resume() {
  const std::int64_t step = begin();
  if (runs_pipedream(run_.config)) require_whole_rounds(run_.config, step, folder_.string());
  const bool may_go_back = run_.config.train.nan_policy == "rollback";
  if (may_go_back && checkpoints_->last_saved() != step) checkpoints_->save_now(step, contents());
  return step;
}

std::int64_t Saving::begin() {
  const bool speaks = run_.world.rank() == 0;
  if (options_.resume) {
    if (const auto step = checkpoints_->load_latest(contents())) {
      if (speaks) run_.world.log().info("resumed after step {} from {}", *step, (folder_ / checkpoint_name(*step)).string());
      return *step;
    }
  }
  if (!options_.begin_with.empty()) {
    const auto step = load_checkpoint(run_.world, options_.begin_with, contents());
    if (speaks) run_.world.log().info("resumed after step {} from {}", step, options_.begin_with.string());
    return step;
  }
  if (has_adapters(run_.config))
    load_adapters(run_);
  else
    load_weights(run_);
  return 0;
}

std::int64_t Saving::go_back(std::int64_t from) {
  if (from <= went_back_from_)
    fail(
        "step {}: not finite again, after the run had gone back because of step {}; the run ends on all ranks "
        "(train.nan_policy = rollback)",
        from, went_back_from_);
  went_back_from_ = from;
  const auto step = checkpoints_->load_latest(contents());
  if (!step) fail("step {}: '{}' has no checkpoint to go back to (train.nan_policy = rollback)", from, folder_.string());
  ++run_.rollbacks;
  if (run_.world.rank() == 0)
    run_.world.log().warning("back after step {}, from {}", *step, (folder_ / checkpoint_name(*step)).string());
  return *step;
}

bool Saving::due(std::int64_t step) const {
  const auto every = run_.config.checkpoint.every;
  return every > 0 && (step % every == 0 || step == run_.config.train.steps);
}

// Behind the last step nobody is elsewhere.
bool Saving::overlaps(std::int64_t step) const {
  return !run_.config.checkpoint.drain && due(step) && step < run_.config.train.steps;
}

void Saving::begin_step(std::int64_t step) {
  if (overlaps(step)) checkpoints_->announce(step, contents().states);
}

void Saving::contribute(std::int64_t step) {
  if (!overlaps(step)) return;
  const Nanoseconds begin = now_ns();
  count(checkpoints_->contribute(step, contents().tensors), begin);
}

void Saving::save(std::int64_t step) {
  if (step == run_.config.train.steps) return save_last(step);
  const Nanoseconds begin = now_ns();
  if (overlaps(step)) {
    checkpoints_->join(step);
    count(false, begin);
  } else {
    count(checkpoints_->save(step, contents()), begin);
  }
}

void Saving::count(bool saved, Nanoseconds begin) {
  saves_.count += saved ? 1 : 0;
  saves_.seconds += seconds_since(begin);
}

void Saving::save_last(std::int64_t step) {
  if (run_.config.checkpoint.every == 0) return;
  // It may have come due, and been skipped or lost.
  checkpoints_->finish();
  if (checkpoints_->last_saved() != step) checkpoints_->save_now(step, contents());
}

std::string Saving::finish() {
  if (!checkpoints_) return {};
  checkpoints_->finish();
  const auto step = checkpoints_->last_saved();
  return step ? (folder_ / checkpoint_name(*step)).string() : std::string();
}

}  // namespace bonfire
