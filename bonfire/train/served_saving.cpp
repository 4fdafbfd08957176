#include "bonfire/train/served_saving.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/comm/group.h"
#include "bonfire/train/resume.h"

namespace bonfire {

// As the loader of any other run says it, and the updates, which a run of as many workers in such a mode goes on from.
class ServedSaving::Place final : public Stateful {
 public:
  explicit Place(const Config& config)
      : batch_(config.train.batch), workers_(config.layout.server_mode == "synchronous" ? 1 : config.data_ranks()) {}

  State save() const override {
    return {{"samples", at.steps * batch_},
            {"skipped", std::int64_t{0}},
            {"updates", at.updates},
            {"updates_of_step", workers_}};
  }
  void load(const State& state) override {
    at.steps = state_value<std::int64_t>(state, "samples") / batch_;
    const bool alike = state.contains("updates_of_step") && state_value<std::int64_t>(state, "updates_of_step") == workers_;
    at.updates = alike ? state_value<std::int64_t>(state, "updates") : at.steps * workers_;
  }

  ServedPlace at;

 private:
  std::int64_t batch_, workers_;
};

ServedSaving::ServedSaving(const World& servers, const Config& config, const TrainOptions& options)
    : servers_(servers),
      together_(config.layout.server_mode == "synchronous"),
      every_(config.layout.server_save_every > 0 ? config.layout.server_save_every : config.checkpoint.every),
      steps_(config.train.steps),
      workers_(config.data_ranks()),
      folder_(checkpoints_of(options.folder)),
      options_(options),
      place_(std::make_unique<Place>(config)) {
  if (servers.rank() == 0)
    servers.log().info("weights: {}", every_ == 0 ? "not kept: checkpoint.every = 0"
                                                  : fmt::format("saved every {} steps{} and at the end, in {}", every_,
                                                                together_ ? "" : fmt::format(" of {} updates", workers_),
                                                                folder_.string()));
  if (every_ == 0 && !options.resume) return;
  const auto& keys = config.checkpoint;
  checkpoints_ =
      std::make_unique<Checkpoints>(servers, folder_,
                                    CheckpointOptions{.keep = static_cast<int>(keys.keep),
                                                      .asynchronous = keys.asynchronous,
                                                      .busy = keys.busy == "skip" ? WhenBusy::skip : WhenBusy::wait,
                                                      .failed = keys.failed == "stop" ? WhenFailed::stop : WhenFailed::warn,
                                                      .configuration = to_toml(config)});
}

ServedSaving::~ServedSaving() { abandon(); }

void ServedSaving::abandon() {
  {
    const std::lock_guard lock(mutex_);
    abandoned_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::optional<ServedPlace> ServedSaving::load(Server& server) {
  const CheckpointContents contents{.tensors = {&server}, .states = {{"run", place_.get()}}};
  std::optional<std::int64_t> name;
  if (options_.resume) name = checkpoints_->load_latest(contents);
  if (name) named_ = *name;
  if (!name && !options_.begin_with.empty()) name = load_checkpoint(servers_, options_.begin_with, contents);
  if (!name) return std::nullopt;
  return place_->at;
}

void ServedSaving::begin(Server& server, const ServedPlace& from) {
  server_ = &server;
  named_ = std::max(named_, from.steps);
  due_ = next_name();
  durable_ = from.updates;
  if (saves() && apart()) thread_ = std::thread([this] { take_turns(); });
}

void ServedSaving::save(std::int64_t name, bool last) {
  const CheckpointContents contents{.tensors = {server_}, .states = {{"run", place_.get()}}};
  updates_[named_ = name] = place_->at.updates;
  if (last)
    checkpoints_->save_now(name, contents);
  else
    checkpoints_->save(name, contents);
  const auto saved = checkpoints_->last_saved();
  const std::lock_guard lock(mutex_);
  if (saved && updates_.contains(*saved)) durable_ = updates_.at(*saved);
}

std::int64_t ServedSaving::updated(const ServedPlace& now) {
  const bool due = saves() && due_ < steps_ && now.updates >= due_ * (together_ ? 1 : workers_);
  if (due) {
    const auto name = std::exchange(due_, due_ + every_);
    if (apart()) {
      const std::lock_guard lock(mutex_);
      ++wanted_;
      changed_.notify_all();
    } else {
      place_->at = now;
      save(name, false);
    }
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return durable_;
}

at::Tensor ServedSaving::largest(at::Tensor numbers) {
  auto work = servers_.group().all_reduce(numbers, Reduce::max);
  while (!work.wait_for(std::chrono::milliseconds(100))) {
    const std::lock_guard lock(mutex_);
    require(!abandoned_, "the run ends");
  }
  return numbers;
}

ServedPlace ServedSaving::least(const ServedPlace& own) {
  auto numbers = at::zeros({2}, at::kLong);
  auto* const number = numbers.data_ptr<std::int64_t>();
  number[0] = -own.steps;
  number[1] = -own.updates;
  largest(numbers);
  return {-number[0], -number[1]};
}

// Each turn is one of all servers. One that has ended takes part in what others are due for.
void ServedSaving::take_turns() try {
  while (true) {
    auto words = at::zeros({2}, at::kLong);
    auto* const word = words.data_ptr<std::int64_t>();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return wanted_ > begun_ || ended_ || abandoned_; });
      if (abandoned_) return;
      word[0] = wanted_ > begun_;  // somebody saves
      word[1] = !ended_;           // somebody goes on
      begun_ += word[0];
    }
    largest(words);
    if (word[0] == 0 && word[1] == 0) return;
    if (word[0] == 0) continue;
    const auto nobody_updates = server_->hold();
    place_->at = least({server_->slowest(), server_->version()});
    save(next_name(), false);
  }
} catch (...) {
  const std::lock_guard lock(mutex_);
  error_ = std::current_exception();
}

std::string ServedSaving::finish(const ServedPlace& own) {
  if (!saves()) return "";
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
  checkpoints_->finish();
  const auto now = least(own);
  const bool newer = now.updates != place_->at.updates;
  place_->at = now;
  // Where the slowest worker is behind the last checkpoint's name this one is newer all the same.
  const auto name = now.steps > named_ ? now.steps : named_ + (newer ? 1 : 0);
  if (checkpoints_->last_saved() != name) save(name, true);
  checkpoints_->finish();
  const auto saved = checkpoints_->last_saved();
  return saved ? (folder_ / checkpoint_name(*saved)).string() : "";
}

}  // namespace bonfire
