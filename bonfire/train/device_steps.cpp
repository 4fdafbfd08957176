#include "bonfire/train/device_steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/data_groups.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/whole_model.h"

namespace bonfire {
namespace {

bool alike(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type(); }

bool alike(const std::vector<Batch>& a, const std::vector<Batch>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Batch& one, const Batch& other) {
    return alike(one.input, other.input) && alike(one.target, other.target);
  });
}

}  // namespace

// A copy of the result on its way to the host.
class DeviceSteps::Reading final : public StepReading {
 public:
  Reading(const at::Tensor& result, Optimizer& optimizer, bool replayed)
      : device_(result.device()),
        optimizer_(optimizer),
        replayed_(replayed),
        values_(at::empty_like(result, at::TensorOptions(at::kCPU).pinned_memory(true))),
        arrived_(std::make_shared<c10::Event>(result.device().type())) {
    values_.copy_(result, /*non_blocking=*/true);
    arrived_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  Values read() override {
    settle();
    const auto* values = values_.const_data_ptr<double>();
    return {.own_loss = values[0], .sum_of_losses = values[1], .gradient_norm = values[2]};
  }

  bool replayed() const override { return replayed_; }

  void settle() {
    if (std::exchange(settled_, true)) return;
    arrived_->synchronize();
    const auto* values = values_.const_data_ptr<double>();
    optimizer_.told_by_device(std::isfinite(values[1]) && std::isfinite(values[2]));
  }
  bool settled() const { return settled_; }

  // A question for any thread.
  std::function<bool()> ended() const {
    return [arrived = arrived_, device = device_] {
      const c10::DeviceGuard guard(device);
      return arrived->query();
    };
  }

 private:
  at::Device device_;
  Optimizer& optimizer_;
  bool replayed_;
  at::Tensor values_;
  std::shared_ptr<c10::Event> arrived_;
  bool settled_ = false;
};

DeviceSteps::DeviceSteps(const World& world, const Mesh& mesh, const Config& config)
    : world_(world), mesh_(mesh), captures_(wants_graphs(config, world.device())), must_(config.train.graphs == "on") {}

DeviceSteps::~DeviceSteps() = default;

void DeviceSteps::settle() {
  for (const auto& reading : unread_) reading->settle();
  unread_.clear();
}

std::shared_ptr<StepReading> DeviceSteps::step(WholeModel& model, const std::vector<Batch>& microbatches,
                                               const Trainee::StepContext& context, const StepOptions& options) {
  if (!std::exchange(begun_, true)) return nullptr;
  // Numbers are prepared for both that the last step may have come to, and not for more.
  while (!unread_.empty() && (unread_.front()->settled() || unread_.size() > 1)) {
    unread_.front()->settle();
    unread_.pop_front();
  }
  if (!result_.defined()) result_ = at::empty({3}, at::TensorOptions(at::kDouble).device(world_.device()));
  if (captures_ && !work_) approach_capture(model, microbatches, context, options);
  model.optimizer->prepare_on_device(/*unknown=*/!unread_.empty());
  const bool replays = work_ && alike(microbatches, inputs_);
  if (replays) {
    for (std::size_t at = 0; at < inputs_.size(); ++at) {
      inputs_[at].input.copy_(microbatches[at].input, /*non_blocking=*/true);
      inputs_[at].target.copy_(microbatches[at].target, /*non_blocking=*/true);
    }
    work_->replay();
    for (const auto& flat : model.engine.flats()) flat->values_changed();
  } else {
    issue(model, microbatches, context, options);
  }
  auto reading = std::make_shared<Reading>(result_, *model.optimizer, replays);
  if (replays)
    for (const auto& collective : collectives_) collective(reading->ended());
  unread_.push_back(reading);
  return reading;
}

void DeviceSteps::approach_capture(WholeModel& model, const std::vector<Batch>& microbatches,
                                   const Trainee::StepContext& context, const StepOptions& options) {
  if (!alike(microbatches, inputs_)) {
    issued_ = 0;
    inputs_.clear();
    for (const auto& batch : microbatches)
      inputs_.push_back({.input = at::empty_like(batch.input, at::TensorOptions(world_.device()).pinned_memory(false)),
                         .target = at::empty_like(batch.target, at::TensorOptions(world_.device()).pinned_memory(false)),
                         .samples = {}});
  }
  if (issued_++ < steps_before_capture) return;
  // What is captured must not meet what is under way.
  settle();
  capture(model, context, options);
}

void DeviceSteps::capture(WholeModel& model, const Trainee::StepContext& context, const StepOptions& options) {
  model.optimizer->prepare_on_device(/*unknown=*/false);
  auto work = make_captured_work(world_.device());
  calls_ = std::make_unique<CapturedCalls>(*model.model, world_.device());
  auto& recorder = world_.recorder();
  std::string problem;
  recorder.begin_capture();
  try {
    work->capture([&] {
      model.engine.forget_uses();
      issue(model, inputs_, context, options);
      calls_->issue();
    });
  } catch (const Error& error) {
    problem = error.what();
  }
  collectives_ = recorder.end_capture();
  model.engine.forget_uses();
  if (!problem.empty()) model.engine.abandon_step();

  // All ranks or none: one that steps in parts does the same collectives, but the others would not know that it does.
  const auto& group = world_.group();
  // No part of a step, so it is in no list of one.
  const bool recording = recorder.recording();
  recorder.stop();
  const int failed = static_cast<int>(group.max(problem.empty() ? 0 : group.size() - group.rank()));
  if (recording) recorder.start();
  if (failed == 0) {
    work_ = std::move(work);
    calls_->captured();
    return;
  }
  captures_ = false;
  calls_->failed();
  calls_.reset();
  collectives_.clear();
  inputs_.clear();
  const auto words = problem.empty() ? fmt::format("rank {} could not", group.size() - failed)
                                     : fmt::format("in its {}: {}", place_, problem);
  if (must_) fail("step {} cannot be captured (train.graphs = \"on\"; allowed: auto | off): {}", context.step, words);
  if (!problem.empty())
    world_.log().warning("step {} cannot be captured; training continues without graphs (train.graphs = \"auto\"): {}",
                         context.step, words);
}

void DeviceSteps::issue(WholeModel& model, const std::vector<Batch>& microbatches, const Trainee::StepContext& context,
                        const StepOptions& options) {
  place_ = "forward and backward";
  const auto own = model.passes(microbatches, context);
  auto sum = own.clone();
  DataGroups::of_stage(mesh_).all.all_reduce(sum).wait();
  place_ = "update";
  const auto norm = model.optimizer->step_on_device(options, sum);
  result_.narrow(0, 0, 1).copy_(own);
  result_.narrow(0, 1, 1).copy_(sum);
  result_.narrow(0, 2, 1).copy_(norm.view({1}));
}

}  // namespace bonfire
