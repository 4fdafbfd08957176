#include "bonfire/train/pipedream_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/train/engine_options.h"
#include "bonfire/train/staged_model.h"

namespace bonfire {

// Numbers of one minibatch: this rank's part of the loss, the square of the norm of its stage's gradient, its staleness.
struct PipeDreamModel::Notes {
  at::Tensor mine = at::zeros({3}, at::kDouble), all{};
  Work work{};
  bool told = false;
  double seconds = 0;
};

class PipeDreamModel::Reading final : public StepReading {
 public:
  Reading(PipeDreamModel& model, std::shared_ptr<Notes> notes) : model_(model), notes_(std::move(notes)) {}

  Values read() override {
    require(notes_->told, "a minibatch is read that the other ranks were not told of");
    notes_->work.wait();
    const auto all = notes_->all.cpu().reshape({-1, 3});
    Values values{.own_loss = notes_->mine[0].item<double>(), .staleness = 0, .seconds = notes_->seconds};
    double squares = 0;
    const auto& robin = model_.pipeline_.robin();
    for (int stage = 0, rank = 0; stage < static_cast<int>(robin.replicas.size()); ++stage) {
      squares += all[rank][1].item<double>();
      auto& most = model_.overlap_.staleness[static_cast<std::size_t>(stage)];
      int& here = values.stale_stages.emplace_back(0);
      for (int replica = 0; replica < robin.replicas[static_cast<std::size_t>(stage)]; ++replica, ++rank) {
        values.sum_of_losses += all[rank][0].item<double>();
        here = std::max(here, static_cast<int>(all[rank][2].item<double>()));
      }
      most = std::max(most, here);
      values.staleness = std::max<double>(*values.staleness, here);
    }
    values.gradient_norm = std::sqrt(squares);
    return values;
  }
  bool replayed() const override { return false; }

 private:
  PipeDreamModel& model_;
  std::shared_ptr<Notes> notes_;
};

PipeDreamModel::PipeDreamModel(const World& world, const Config& config, const Mesh& mesh, const Source& source)
    : world_(world),
      readings_(world.group("pipedream readings", mesh.group(Axis::world).world_ranks(), Axis::world)),
      pipeline_([&] {
        PipeDreamOptions options{.robin = robin_of(config), .stash = config.layout.stash};
        options.stages = stages_of(config, static_cast<int>(options.robin.replicas.size()));
        options.shard = engine_options(config, world.log());
        options.shard.reshard_after_forward = {};
        options.example = example_of(config, source, world);
        return PipeDream(mesh, chain_of(config, world, mesh, rollbacks_), std::move(options));
      }()),
      optimizer_(make_optimizer(pipeline_, config)),
      overlap_{.staleness = std::vector<int>(pipeline_.robin().replicas.size()), .stash = config.layout.stash} {
  pipeline_.on_update([this](const StageUpdate& update) { note(update); });
}

at::Tensor PipeDreamModel::forward_backward(const std::vector<Batch>&, const StepContext&) {
  fail("PipeDream has no step whose gradients are all there before an update");
}

StepResult PipeDreamModel::update(const StepOptions&) { fail("PipeDream updates its stages by itself"); }

// With the learning rate of its last minibatch. All minibatches in it have its norm.
void PipeDreamModel::note(const StageUpdate& update) {
  optimizer_->set_lr(lrs_.at(update.minibatch));
  auto options = options_;
  options.skip_non_finite = true;  // asks for the norm
  const auto result = optimizer_->step(options);
  if (result.skipped)
    fail("step {}: the gradients of stage {} are not finite; the run ends on all ranks (train.nan_policy = stop)",
         first_step_ + update.minibatch, pipeline_.stage());
  for (auto at = lrs_.begin(); at != lrs_.end() && at->first <= update.minibatch; at = lrs_.erase(at)) {
    auto& mine = notes_.at(at->first)->mine;
    mine[1] = result.gradient_norm * result.gradient_norm;
    mine[2] = update.staleness;
  }
  if (on_step_made_) on_step_made_(first_step_ + update.minibatch);
}

std::shared_ptr<StepReading> PipeDreamModel::whole_step(const std::vector<Batch>& batches, const StepContext& context,
                                                        const StepOptions& options) {
  const std::int64_t minibatch = pipeline_.admitted();
  if (ended_.empty()) ended_.push_back(now_ns());
  first_step_ = context.step - minibatch;
  options_ = options;
  lrs_[minibatch] = lr_;
  const auto notes = notes_[minibatch] = std::make_shared<Notes>();
  auto microbatches = to_microbatches(batches, world_);
  auto first_sample = context.first_sample;
  for (auto& microbatch : microbatches) {
    microbatch.step = static_cast<std::uint64_t>(context.step);
    microbatch.first_sample = first_sample;
    first_sample += microbatch.samples();
  }
  std::optional<Tracer::Phase> phase;
  pipeline_.on_cell([&](const schedule::Action& action, bool begins) {
    if (!schedule::is_compute(action.kind)) return;
    phase.reset();
    if (begins) phase.emplace(&context.tracer, schedule::to_text(action));
  });
  pipeline_.admit(microbatches);
  pipeline_.on_cell(nullptr);
  // A replica has nothing to do for most minibatches of a round: the mean over one.
  ended_.push_back(now_ns());
  keep_pace(1e-9 * static_cast<double>(ended_.back() - ended_[ended_.size() - 2]));
  if (static_cast<int>(ended_.size()) > pipeline_.robin().round() + 1) ended_.pop_front();
  notes->seconds = 1e-9 * static_cast<double>(ended_.back() - ended_.front()) / static_cast<double>(ended_.size() - 1);
  newest_ = notes;
  tell_until(minibatch + 1 - pipeline_.minibatches_on_their_way());
  return std::make_shared<Reading>(*this, notes);
}

void PipeDreamModel::keep_pace(double seconds) {
  if (++pace_.since_empty > pipeline_.minibatches_on_their_way()) {
    ++pace_.full;
    pace_.full_seconds += seconds;
  } else if (pipeline_.drains() > 0) {  // the first filling also sets up buffers and connections
    if (pace_.since_empty == 1) ++pace_.fills;
    ++pace_.filling;
    pace_.filling_seconds += seconds + std::exchange(pace_.drain_seconds, 0);
  }
}

std::optional<Trainee::Overlap> PipeDreamModel::overlap() const {
  auto overlap = overlap_;
  if (pace_.full > 0 && pace_.fills > 0) {
    const double each = pace_.full_seconds / static_cast<double>(pace_.full);
    const double lost = pace_.filling_seconds - each * static_cast<double>(pace_.filling);
    overlap.seconds_lost = std::max(0.0, lost / static_cast<double>(pace_.fills));
  }
  return overlap;
}

void PipeDreamModel::tell_until(std::int64_t minibatch) {
  for (; told_ < minibatch; ++told_) {
    const auto node = notes_.extract(told_);
    auto& notes = *node.mapped();
    notes.mine[0] = pipeline_.take_loss(told_);
    const auto mine = notes.mine.to(world_.device());
    notes.all = at::zeros({3 * readings_.size()}, mine.options());
    notes.work = readings_.all_gather(notes.all, mine);
    notes.told = true;
  }
}

void PipeDreamModel::drain() {
  if (pipeline_.empty()) return;
  const Nanoseconds begin = now_ns();
  pipeline_.drain();
  const double seconds = 1e-9 * static_cast<double>(now_ns() - begin);
  overlap_.drain_seconds += seconds;
  newest_->seconds += seconds;
  pace_.drain_seconds = seconds;
  pace_.since_empty = 0;
  ended_.clear();
  overlap_.drains = pipeline_.drains();
  tell_until(pipeline_.admitted());
}

at::Tensor PipeDreamModel::evaluate(const std::vector<Batch>& batches, std::size_t counted) {
  auto microbatches = to_microbatches(batches, world_);
  double weight = 0;
  for (std::size_t at = 0; at < microbatches.size(); ++at) {
    microbatches[at].weight = at < counted ? static_cast<double>(microbatches[at].samples()) : 0;
    weight += *microbatches[at].weight;
  }
  pipeline_.module().train(false);
  const double loss = pipeline_.evaluate(microbatches);
  pipeline_.module().train(true);
  return at::tensor({loss * weight, weight}, at::kDouble).to(world_.device());
}

}  // namespace bonfire
