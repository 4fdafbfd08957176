#include "bonfire/shard/flat_group.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/equality.h"
#include "bonfire/shard/guards.h"

namespace bonfire {

// Lets layers of ours write a parameter's gradient straight into the flat buffer. Outlives the engine where the module does;
// from then on the gradient is the parameter's own again.
class FlatSink final : public GradientSink {
 public:
  FlatSink(at::Tensor parameter, std::function<at::Tensor(bool& fresh)> home)
      : parameter_(std::move(parameter)), home_(std::move(home)) {}

  at::Tensor buffer(bool& fresh) override {
    if (home_) return home_(fresh);
    fresh = !parameter_.grad().defined();
    if (fresh) parameter_.mutable_grad() = at::empty_like(parameter_.detach());
    return parameter_.grad();
  }
  // The parameter's own hook tells when all uses have arrived: autograd calls it with no gradient then.
  void arrived() override {}
  void leave() { home_ = nullptr; }

 private:
  at::Tensor parameter_;
  std::function<at::Tensor(bool& fresh)> home_;
};

namespace {

// Where a gradient has just been accumulated.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ArrivalHook(std::function<void(const at::Tensor&)> arrived) : arrived_(std::move(arrived)) {}
  void operator()(const torch::autograd::Variable& tensor) override { arrived_(tensor); }

 private:
  std::function<void(const at::Tensor&)> arrived_;
};

at::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

}  // namespace

FlatGroup::FlatGroup(const ShardSettings& settings, torch::nn::Module& module, Company company)
    : settings_(settings),
      memory_(company.memory ? std::move(company.memory) : std::make_shared<EngineMemory>(device_of(module))),
      first_place_(memory_->engines++ << 22),
      layout_(settings, module),
      buffers_(module, settings.options),
      reduction_(settings.options.hook ? settings.options.hook
                                       : make_reduction(settings.groups.replicas, settings.over_replicas())) {
  reducer_ = std::make_unique<Reducer>(memory_, reduction_,
                                       ReducerOptions{.shard = settings.groups.shards,
                                                      .wire = settings.scattered_in(),
                                                      .whole_gradients = settings.whole_gradients(),
                                                      // A user's hook may have others to tell, whoever the replicas are.
                                                      .replicated = settings.replicated() || settings.options.hook,
                                                      .in_company = company.reduces_too,
                                                      .must_go_on = [this] { return driver_->ranks_differ(); },
                                                      .patience = settings.options.patience});
  start_equal();
  try {
    install(module);
  } catch (...) {
    leave_module();
    throw;
  }
}

FlatGroup::~FlatGroup() { leave_module(); }

void FlatGroup::leave_module() {
  for (std::size_t at = 0; at < layout_.parameters().size(); ++at) {
    for (const auto& tensor : layout_.parameters()[at].all())
      torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
    if (at < sinks_.size()) sinks_[at]->leave();
  }
}

void FlatGroup::begin(Driver& driver) {
  driver_ = &driver;
  lay_out(layout_.likely_order());
}

void FlatGroup::start_equal() {
  const Group& all = settings_.groups.all;
  std::vector<NamedTensor> tensors, whole, unsplit;
  for (const auto& parameter : layout_.parameters()) {
    tensors.push_back({parameter.name, parameter.tensor});
    // A build scope has seen to the others.
    if (layout_.prepared(parameter)) continue;
    whole.push_back(tensors.back());
    if (!parameter.placement.split()) unsplit.push_back(tensors.back());
  }
  require_same_structure(all, tensors);
  if (settings_.options.start == Start::check) {
    require_same_values(all, whole);
  } else {
    broadcast_values(all, whole);
    buffers_.broadcast(all);
  }
  // Each of the ranks that split the rest has these, and keeps them equal by equal gradients.
  require_same_values(settings_.groups.splits, unsplit);
}

void FlatGroup::install(torch::nn::Module& module) {
  auto& parameters = layout_.parameters();
  for (std::size_t at = 0; at < parameters.size(); ++at) {
    auto& parameter = parameters[at];
    for (const auto& tensor : parameter.all())
      torch::autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>([this, at](const at::Tensor& of) { arrive(at, of); }));
    sinks_.push_back(std::make_shared<FlatSink>(parameter.tensor,
                                                [this, &parameter](bool& fresh) { return sink_buffer(parameter, fresh); }));
    // Layers add what they compute in, or two-byte numbers to fp32. Anything else goes through autograd.
    const auto type = settings_.whole_gradient_type(parameter.master);
    const bool direct = type == parameter.compute || (type == at::kFloat && c10::elementSize(parameter.compute) == 2);
    if (direct) set_gradient_sink(module, parameter.name, sinks_.back());
    parameter.products = fp8_products(module, parameter.name);
    if (parameter.scales == 0) continue;
    // Autograd cannot carry its gradient: that would be in eight bits as well.
    parameter.known_scales = std::make_shared<WeightScales>();
    if (!direct || !parameter.tied.empty() || set_weight_scales(module, parameter.name, parameter.known_scales) != 1)
      fail_config(
          "precision.scales: parameter '{}' is not the weight of one layer that makes its products in fp8 (set_fp8), with "
          "gradients in {} or fp32; allowed: 0",
          parameter.name, c10::toString(parameter.compute));
  }
}

void FlatGroup::lay_out(const std::vector<std::size_t>& order) {
  layout_.lay_out(order, gradients_ == Gradients::whole);
  reduction_->reset();
  driver_->laid_out();
}

void FlatGroup::unshard(int behind) {
  for (std::size_t at = 0; at < flats().size(); ++at) {
    auto& flat = *flats()[at];
    flat.require_intact();
    flat.bring_in(pool(), {.group = settings_.groups.gathers,
                           // What is frozen has no other values.
                           .behind = flat.trained().empty() ? 0 : behind,
                           .place = first_place_ + static_cast<std::int64_t>(at)});
  }
}

void FlatGroup::await() {
  for (auto& flat : flats()) flat->await();
}

void FlatGroup::reshard() {
  for (auto& flat : flats()) flat->let_go();
}

void FlatGroup::follow_freezing() {
  const auto change = layout_.note_training();
  if (!change.any) return;
  // When the order was learned, what is thawed now was never finished, and came last.
  lay_out(change.thawed ? layout_.likely_order() : layout_.order());
  // Backward may have to go further than before, or less far, and finishes other groups first.
  learned_ = false;
  driver_->training_changed();
}

// What was frozen or thawed moves when a pass begins. One that is under way has forwards that go by the old order.
void FlatGroup::require_same_training() const {
  for (const auto& parameter : layout_.parameters())
    require(parameter.trained == parameter.tensor.requires_grad(),
            "parameter '{}' was {} after a forward with gradients whose backward has not come: do that after "
            "Engine::backward or Engine::accumulate, or repeat the forward",
            parameter.name, parameter.trained ? "frozen" : "thawed");
}

void FlatGroup::require_unwritten() const {
  const auto* written = layout_.written_by_others();
  if (!written) return;
  driver_->meet();
  fail(
      "parameter '{}' was written to: forward uses a {} copy; your write did not reach the {} master weights; update with "
      "an optimizer of Bonfire's (AdamW, Adam, Sgd) in place of torch::optim, and change values inside of "
      "Engine::full_parameters(/*write=*/true)",
      written->name, c10::toString(written->compute), c10::toString(written->master));
}

void FlatGroup::begin_gradients(const BackwardKind& how) {
  require_unwritten();
  const bool unused = gradients_ == Gradients::whole && !settings_.gradients_readable();
  // Others may still need this rank for their forward before they are told the same.
  if (unused) driver_->meet();
  require(!unused,
          "a second Engine::backward before the gradients of the first were used: with {} sharded, call Engine::accumulate "
          "for all microbatches but the last, and {}",
          plan::name_of(settings_.options.what), use_our_optimizers);
  const bool afresh = gradients_ == Gradients::spent || gradients_ == Gradients::lost;
  const bool goes_on = gradients_ == Gradients::partial;
  gradients_ = Gradients::partial;
  for (auto& flat : flats())
    if (afresh) flat->set_share_written(false);
  for (auto& parameter : layout_.parameters()) {
    if (!parameter.trained) continue;
    if (afresh) parameter.tensor.mutable_grad().reset();
    auto& flat = *flats()[parameter.flat];
    if (goes_on && flat.keeps_whole_gradients() && flat.written(parameter.segment))
      parameter.tensor.mutable_grad() = flat.gradient_view(parameter.segment);
    // Somebody else (an optimizer of torch's) may have dropped the gradient as well, where it was his to read.
    const bool dropped = !goes_on && flat.keeps_whole_gradients() && !parameter.tensor.grad().defined();
    if (afresh || dropped) flat.set_written(parameter.segment, false);
  }
  backward_.begin(layout_, how);
  reducer_->begin(flats(), how.last, how.in_company);
}

// A Unit's backward has ended, whether or not all of its parameters were used.
void FlatGroup::backward_ended(const FlatParameter& flat) {
  const auto at = layout_.index_of(flat);
  if (backward_.finish(at, layout_.order()[at])) reduce_ready();
}

// Stream: the one of the backward operation that made the gradient.
void FlatGroup::arrive(std::size_t number, const at::Tensor& tensor) {
  const HostClock::Scope timed(host_);
  auto& parameter = layout_.parameters()[number];
  require(backward_.running(),
          "the gradient of '{}' came outside of Engine::backward or Engine::accumulate: call engine.backward(loss) instead "
          "of loss.backward()",
          parameter.name);
  require(
      parameter.trained,
      "the gradient of '{}' came although it is frozen: it was trained in the forward of this backward; repeat the forward",
      parameter.name);
  auto& flat = *flats()[parameter.flat];
  require(!reducer_->launched(parameter.flat),
          "the gradient of '{}' came after the backward of its Unit had ended: is it used outside of its Unit's forward?",
          parameter.name);
  const auto gradient = tensor.grad();
  if (gradient.defined()) {
    const at::NoGradGuard no_grad;
    reducer_->open(flat);
    const auto home = flat.gradient_view(parameter.segment);
    if (!same_memory(gradient, home)) flat.written(parameter.segment) ? home.add_(gradient) : home.copy_(gradient);
    flat.set_written(parameter.segment, true);
  }
  // Where the buffer stays, later microbatches add to it in place. It is the first name's, whichever of them was used.
  const bool stays = flat.keeps_whole_gradients() && flat.written(parameter.segment);
  tensor.mutable_grad().reset();
  parameter.tensor.mutable_grad() = stays ? flat.gradient_view(parameter.segment) : at::Tensor();
  if (backward_.arrived(number, parameter)) reduce_ready();
}

at::Tensor FlatGroup::sink_buffer(LaidParameter& parameter, bool& fresh) {
  const HostClock::Scope timed(host_);
  auto& flat = *flats()[parameter.flat];
  reducer_->open(flat);
  fresh = !flat.written(parameter.segment);
  flat.set_written(parameter.segment, true);
  return flat.gradient_view(parameter.segment);
}

void FlatGroup::reduce_ready() {
  for (const auto* first = before_; first; first = first->before_)
    if (first->backward_.how().reduces && !first->backward_.all_taken()) return;
  while (const auto next = backward_.take_ready()) {
    driver_->before_reduction(*flats()[*next]);
    reducer_->launch(*next);
  }
  if (!backward_.all_taken()) return;
  auto* next = behind_;
  while (next && next->backward_.running() && !next->backward_.how().reduces) next = next->behind_;
  if (next && next->backward_.running()) next->reduce_ready();
}

void FlatGroup::reduce_after(FlatGroup* first) {
  if (before_) before_->behind_ = nullptr;
  before_ = first;
  if (first) first->behind_ = this;
}

// What is not averaged over the ranks yet is nobody's to read: an optimizer that knows nothing of ranks would make them
// different.
void FlatGroup::hide_gradients() {
  for (auto& parameter : layout_.parameters())
    if (parameter.trained) parameter.tensor.mutable_grad().reset();
}

void FlatGroup::end_gradients() {
  backward_.end();
  if (!backward_.how().last) hide_gradients();
  if (!backward_.how().reduces) return;
  // Nothing comes any more, also for parameters that were not used.
  backward_.complete_all();
  reduce_ready();
}

void FlatGroup::await_reductions() { reducer_->end(); }

void FlatGroup::end_step() {
  gradients_ = Gradients::whole;
  for (auto& parameter : layout_.parameters()) {
    if (!parameter.trained) continue;
    const auto& flat = *flats()[parameter.flat];
    parameter.tensor.mutable_grad() = settings_.gradients_readable() ? flat.gradient_view(parameter.segment) : at::Tensor();
  }
  if (settings_.keeps_buffers_equal()) buffers_.broadcast(settings_.groups.all);
  // A schedule with several versions has forwards whose backward is still to come: they have the buffers that there are.
  if (!learned_ && !(settings_.driver == DrivenBy::schedule && settings_.options.versions > 1)) learn_order();
}

// All ranks take rank 0's order, once.
void FlatGroup::learn_order() {
  learned_ = true;
  const auto& finished = backward_.finished_groups();
  std::vector<std::int64_t> numbers(finished.begin(), finished.end());
  // Groups that did not finish (nothing trained, or unused) come last, as they were.
  for (const std::size_t group : layout_.order())
    if (std::find(finished.begin(), finished.end(), group) == finished.end())
      numbers.push_back(static_cast<std::int64_t>(group));
  auto agreed = at::tensor(numbers, at::kLong).to(pool().device());
  settings_.groups.all.broadcast(agreed, 0).wait();
  const auto on_host = agreed.cpu();
  const std::vector<std::size_t> learned(on_host.data_ptr<std::int64_t>(),
                                         on_host.data_ptr<std::int64_t>() + on_host.numel());
  if (learned != layout_.order()) lay_out(learned);
}

std::vector<std::int64_t> FlatGroup::learned_places() const {
  std::vector<std::int64_t> places(layout_.order().size(), -1);
  for (std::size_t at = 0; learned_ && at < places.size(); ++at) places[layout_.order()[at]] = static_cast<std::int64_t>(at);
  return places;
}

void FlatGroup::take_places(const std::vector<std::int64_t>& places) {
  constexpr auto none = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> order(layout_.order().size(), none);
  if (places.size() != order.size()) return;
  for (std::size_t group = 0; group < places.size(); ++group) {
    if (places[group] < 0 || static_cast<std::size_t>(places[group]) >= order.size()) return;
    auto& at = order[static_cast<std::size_t>(places[group])];
    if (at != none) return;
    at = group;
  }
  if (order != layout_.order()) lay_out(order);
  learned_ = true;
}

// Ranks that threw at the same place have launched the same reductions, which end. Where this one is alone, the others would
// wait for it, and it for them.
void FlatGroup::abandon(const std::string& why) {
  backward_.end();
  gradients_ = Gradients::lost;
  // Reductions over the replicas begin when others have landed, on each rank at its own time.
  const auto place = settings_.groups.gathers.issued() + (static_cast<std::int64_t>(backward_.next()) << 40);
  const bool together = settings_.groups.all.all_failed_alike(why, place, settings_.options.patience);
  try {
    driver_->abandon();
    together ? reducer_->abandon() : reducer_->forget();
  } catch (const std::exception&) {
    // The first error says more.
  }
}

void FlatGroup::forget() {
  backward_.end();
  gradients_ = Gradients::lost;
  refreshes_.clear();
  to_agree_on_.clear();
  reducer_->forget();
  driver_->abandon();
}

void FlatGroup::require_gradients() const {
  driver_->meet();
  switch (gradients_) {
    case Gradients::whole: return driver_->before_update();
    case Gradients::none: fail("an update before any backward: call engine.backward(loss) first");
    case Gradients::partial:
      fail(
          "an update with the gradients of some microbatches only, which are not averaged over the ranks yet: call "
          "engine.backward(loss), not accumulate, for the last microbatch of a step");
    case Gradients::spent: fail("a second update with the same gradients: call engine.backward(loss) before each step");
    case Gradients::lost: fail("an update after a backward that threw, whose gradients are lost: repeat the backward");
  }
}

void FlatGroup::spend_gradients(const GradientUse& use) {
  gradients_ = Gradients::spent;
  reduction_->spent(use);
}

void FlatGroup::updated(std::size_t at) {
  const at::NoGradGuard no_grad;
  auto& flat = *flats().at(at);
  if (auto numbers = flat.to_agree_on(); numbers.numel() > 0)
    to_agree_on_.emplace_back(&flat, std::move(numbers));
  else
    refreshes_.push_back(flat.refresh(settings_.groups.gathers));
}

void FlatGroup::finish_update() {
  agree_and_encode();
  for (auto& work : refreshes_) work.wait();
  refreshes_.clear();
}

// One reduction for the whole model.
void FlatGroup::agree_and_encode() {
  const auto updated = std::exchange(to_agree_on_, {});
  if (updated.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const auto& [flat, numbers] : updated) parts.push_back(numbers);
  const auto all = at::cat(parts);
  if (settings_.factors.optimizer > 1) settings_.groups.shards.all_reduce(all, Reduce::max).wait();
  std::int64_t begin = 0;
  for (const auto& [flat, numbers] : updated) {
    flat->encode(all.narrow(0, begin, numbers.numel()));
    begin += numbers.numel();
    refreshes_.push_back(flat->refresh(settings_.groups.gathers));
  }
}

}  // namespace bonfire
