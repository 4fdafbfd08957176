#include "bonfire/shard/engine.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_ref.h"
#include "bonfire/shard/engine_state.h"
#include "bonfire/shard/guards.h"

namespace bonfire {

at::Tensor FlatSink::buffer(bool& fresh) {
  if (home_) return home_(fresh);
  fresh = !parameter_.grad().defined();
  if (fresh) parameter_.mutable_grad() = at::empty_like(parameter_.detach());
  return parameter_.grad();
}

// Gradients that are kept as shares are reduced in every microbatch.
void Engine::State::begin_backward(bool is_last) {
  begin_backward({.reduces = is_last || settings.reduces_every_microbatch(), .last = is_last});
}

void Engine::State::begin_backward(const GradientPass& pass) {
  if (!residency && !options.driven) follow_freezing();
  require_unwritten();
  const bool unused = gradients == Gradients::whole && !settings.gradients_readable();
  // Others may still need this rank for their forward before they are told the same.
  if (unused) meet();
  require(!unused,
          "a second Engine::backward before the gradients of the first were used: with {} sharded, call Engine::accumulate "
          "for all microbatches but the last, and {}",
          plan::name_of(options.what), use_our_optimizers);
  last = pass.last;
  reducing = pass.reduces;
  const bool afresh = starts_afresh();
  gradients = Gradients::partial;
  for (auto& flat : flats)
    if (afresh) flat->set_share_written(false);
  for (auto& parameter : parameters) {
    parameter.arrived = 0;
    if (!parameter.trained) continue;
    if (afresh) parameter.tensor.mutable_grad().reset();
    // Somebody else (an optimizer of torch's) may have dropped the gradient as well, where it was his to read.
    const bool dropped = flats[parameter.flat]->keeps_whole_gradients() && !parameter.tensor.grad().defined();
    if (afresh || dropped) flats[parameter.flat]->set_written(parameter.segment, false);
  }
  missing.assign(flats.size(), 0);
  missing_in_group.assign(groups.size(), 0);
  for (const auto& parameter : parameters)
    if (parameter.trained) ++missing[parameter.flat], ++missing_in_group[parameter.group];
  finished_groups.clear();
  next = 0;
  running = true;
  reducer->begin(flats, last);
  if (joining) missing.assign(flats.size(), 0);
  if (!seams_gather() || joining) return;
  // Units that were not used are ready, on a rank that others may be waiting for.
  for (std::size_t at = 0; at < flats.size(); ++at)
    if (!residency->expects_backward(*flats[at])) missing[at] = 0;
  if (reducing) launch_ready();
}

// A Unit's backward has ended, whether or not all of its parameters were used.
void Engine::State::backward_ended(const FlatParameter& flat) {
  if (!running || !reducing) return;
  const auto at = static_cast<std::size_t>(
      std::find_if(flats.begin(), flats.end(), [&](const auto& other) { return other.get() == &flat; }) - flats.begin());
  if (std::exchange(missing[at], 0) == 0) return;
  finished_groups.push_back(order[at]);
  launch_ready();
}

// Stream: the one of the backward operation that made the gradient.
void Engine::State::arrive(Parameter& parameter, const at::Tensor& tensor) {
  const HostClock::Scope timed(host);
  require(running,
          "the gradient of '{}' came outside of Engine::backward or Engine::accumulate: call engine.backward(loss) instead "
          "of loss.backward()",
          parameter.name);
  auto& flat = *flats[parameter.flat];
  require(!reducer->launched(parameter.flat),
          "the gradient of '{}' came after the backward of its Unit had ended: is it used outside of its Unit's forward?",
          parameter.name);
  const auto gradient = tensor.grad();
  if (gradient.defined()) {
    const at::NoGradGuard no_grad;
    reducer->open(flat);
    const auto home = flat.gradient_view(parameter.segment);
    if (!same_memory(gradient, home)) flat.written(parameter.segment) ? home.add_(gradient) : home.copy_(gradient);
    flat.set_written(parameter.segment, true);
  }
  // Where the buffer stays, later microbatches add to it in place. It is the first name's, whichever of them was used.
  const bool stays = flat.keeps_whole_gradients() && flat.written(parameter.segment);
  tensor.mutable_grad().reset();
  parameter.tensor.mutable_grad() = stays ? flat.gradient_view(parameter.segment) : at::Tensor();
  if (++parameter.arrived != 1 + parameter.tied.size() || !reducing) return;
  if (--missing_in_group[parameter.group] == 0) finished_groups.push_back(parameter.group);
  if (--missing[parameter.flat] == 0) launch_ready();
}

at::Tensor Engine::State::sink_buffer(Parameter& parameter, bool& fresh) {
  const HostClock::Scope timed(host);
  auto& flat = *flats[parameter.flat];
  reducer->open(flat);
  fresh = !flat.written(parameter.segment);
  flat.set_written(parameter.segment, true);
  return flat.gradient_view(parameter.segment);
}

// Buckets are reduced in one order on all ranks, whatever the order in which they get ready here.
void Engine::State::launch_ready() {
  while (next < flats.size() && missing[next] == 0) {
    if (seams_gather()) residency->leave_out(*flats[next]);
    reducer->launch(next++);
  }
}

void Engine::State::end_backward() {
  running = false;
  if (reducing && settings.comes_and_goes()) {
    // Nothing comes any more. Others may wait for what this rank has left out, or for its word on the next gather.
    if (!residency->follows_course()) reducer->hurry();
    missing.assign(flats.size(), 0);
    launch_ready();
  }
  if (residency) residency->end_pass();
  if (reducing) reducer->end();
  end_step();
}

void Engine::State::end_step() {
  if (!last) return;
  gradients = Gradients::whole;
  for (auto& parameter : parameters) {
    if (!parameter.trained) continue;
    const auto& flat = *flats[parameter.flat];
    parameter.tensor.mutable_grad() = settings.gradients_readable() ? flat.gradient_view(parameter.segment) : at::Tensor();
  }
  if (settings.keeps_buffers_equal()) broadcast_buffers();
  if (!learned) learn_order();
}

void Engine::State::broadcast_buffers() {
  const Group& all = mesh.group(Axis::data);
  if (buffers.empty()) return;
  std::int64_t bytes = 0;
  for (const auto& buffer : buffers) bytes += static_cast<std::int64_t>(buffer.nbytes());
  const at::NoGradGuard no_grad;
  auto packed = at::empty({bytes}, buffers.front().options().dtype(at::kByte));
  const auto each = [&](auto&& action) {
    std::int64_t offset = 0;
    for (auto& buffer : buffers) {
      const auto size = static_cast<std::int64_t>(buffer.nbytes());
      action(buffer, packed.narrow(0, offset, size));
      offset += size;
    }
  };
  each([](at::Tensor& buffer, at::Tensor part) { part.copy_(buffer.contiguous().view(-1).view(at::kByte)); });
  all.broadcast(packed, 0).wait();
  if (all.rank() == 0) return;
  each([](at::Tensor& buffer, at::Tensor part) {
    auto values = at::empty(buffer.sizes(), buffer.options());
    values.view(-1).view(at::kByte).copy_(part);
    buffer.copy_(values);
  });
}

void Engine::State::scale_gradients() {
  const double factor = mesh.group(Axis::data).size() / active;
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (auto& flat : flats)
    for (auto& share : flat->trained()) share.gradient.mul_(factor);
}

// What was frozen or thawed moves when a pass begins. One that is under way has forwards that go by the old order.
void Engine::State::require_same_training() const {
  for (const auto& parameter : parameters)
    require(parameter.trained == parameter.tensor.requires_grad(),
            "parameter '{}' was {} after a forward with gradients whose backward has not come: do that after "
            "Engine::backward or Engine::accumulate, or repeat the forward",
            parameter.name, parameter.trained ? "frozen" : "thawed");
}

void Engine::State::run_backward(const at::Tensor& loss, bool is_last, const BackwardOptions& how) {
  require(!options.driven, "Engine::backward of a module that a schedule runs (driven)");
  for (const auto& flat : flats) flat->require_intact();
  if (residency) residency->begin_backward(how.retain_graph);
  announce_backward(is_last);
  begin_backward(is_last);
  try {
    require_same_training();
    {
      const TraceScope span(options.trace, "backward", "compute", "compute");
      loss.backward(/*gradient=*/{}, how.retain_graph);
    }
    const TraceScope span(options.trace, "wait for reductions", "wait", "compute");
    end_backward();
  } catch (const std::exception& error) {
    abandon_backward(error.what());
    throw;
  }
}

// Ranks that threw at the same place have launched the same reductions, which end. Where this one is alone, the others would
// wait for it, and it for them.
void Engine::State::abandon_backward(const std::string& words) {
  running = false;
  gradients = Gradients::lost;
  // Reductions over the replicas begin when others have landed, on each rank at its own time.
  const auto place = mesh.gathers().issued() + (static_cast<std::int64_t>(next) << 40);
  const bool together = mesh.all_failed_alike(words, place, options.patience);
  try {
    if (residency) residency->abandon_pass();
    together ? reducer->abandon() : reducer->forget();
  } catch (const std::exception&) {
    // The first error says more.
  }
}

Engine::Engine(const Mesh& mesh, torch::nn::Module& module, ShardOptions options)
    : state_(std::make_shared<State>(mesh, module, std::move(options))) {
  state_->owner = this;
}
Engine::~Engine() = default;
Engine::Engine(Engine&& other) noexcept : state_(std::move(other.state_)) {
  if (state_) state_->owner = this;
}
Engine& Engine::operator=(Engine&& other) noexcept {
  state_ = std::move(other.state_);
  if (state_) state_->owner = this;
  return *this;
}

EngineRef::EngineRef(Engine& engine) : state_(engine.state_) {}

Engine& EngineRef::get() const {
  const auto state = state_.lock();
  require(state != nullptr, "the Engine of this optimizer is gone: it must live as long as the optimizer steps");
  return *static_cast<Engine::State*>(state.get())->owner;
}

void Engine::accumulate(const at::Tensor& loss, const BackwardOptions& how) { state_->run_backward(loss, false, how); }

void Engine::backward(const at::Tensor& loss, const BackwardOptions& how) {
  state_->run_backward(loss, true, how);
  state_->scale_gradients();
}

void Engine::spend_gradients(const GradientUse& use) {
  state_->gradients = State::Gradients::spent;
  state_->reduction->spent(use);
}

void Engine::require_gradients() const {
  using Gradients = State::Gradients;
  state_->meet();
  switch (state_->gradients) {
    case Gradients::whole:
      if (state_->residency && state_->seams_gather()) state_->residency->before_update();
      return;
    case Gradients::none: fail("an update before any backward: call engine.backward(loss) first");
    case Gradients::partial:
      fail(
          "an update with the gradients of some microbatches only, which are not averaged over the ranks yet: call "
          "engine.backward(loss), not accumulate, for the last microbatch of a step");
    case Gradients::spent: fail("a second update with the same gradients: call engine.backward(loss) before each step");
    case Gradients::lost: fail("an update after a backward that threw, whose gradients are lost: repeat the backward");
  }
}

// One reduction for the whole model.
void Engine::State::agree_on_scales() {
  if (unscaled.empty()) return;
  const at::NoGradGuard no_grad;
  std::int64_t count = 0;
  for (const std::size_t flat : unscaled) count += flats[flat]->layout().scales();
  const auto magnitudes = at::zeros({count}, at::TensorOptions(at::kFloat).device(pool.device()));
  const auto each = [&](auto&& action) {
    std::int64_t begin = 0;
    for (const std::size_t at : unscaled) {
      auto& flat = *flats[at];
      action(flat, magnitudes.narrow(0, begin, flat.layout().scales()));
      begin += flat.layout().scales();
    }
  };
  each([](const FlatParameter& flat, const at::Tensor& part) { flat.note_magnitudes(part); });
  if (factors.optimizer > 1) mesh.group(Axis::shard).all_reduce(magnitudes, Reduce::max).wait();
  each([this](FlatParameter& flat, const at::Tensor& part) {
    flat.round_scaled(part);
    refreshes.push_back(flat.refresh(mesh.gathers()));
  });
  unscaled.clear();
}

void Engine::updated(std::size_t flat) {
  if (state_->flats.at(flat)->layout().scales() > 0)
    state_->unscaled.push_back(flat);
  else
    state_->refreshes.push_back(state_->flats.at(flat)->refresh(state_->mesh.gathers()));
}

void Engine::finish_update() {
  state_->agree_on_scales();
  for (auto& work : state_->refreshes) work.wait();
  state_->refreshes.clear();
}

void Engine::forget_uses() {
  state_->pool.forget_uses();
  state_->reducer->pool().forget_uses();
}

void Engine::abandon_step() {
  state_->running = false;
  state_->gradients = State::Gradients::lost;
  state_->refreshes.clear();
  state_->reducer->forget();
  if (state_->residency) state_->residency->abandon_pass();
  forget_uses();
}

void Engine::State::meet() const {
  if (residency && seams_gather()) residency->meet();
}

// Of each flat parameter, whether some rank has to gather it. Collective.
std::vector<bool> Engine::State::out_somewhere() const {
  std::vector<bool> out;
  for (const auto& flat : flats) out.push_back(!flat->present());
  // Between passes, and where a schedule says what is in, ranks hold the same.
  if (!seams_gather() || !residency->meet()) return out;
  auto seen = at::zeros({static_cast<std::int64_t>(flats.size())}, at::kFloat);
  for (std::size_t at = 0; at < flats.size(); ++at) seen.data_ptr<float>()[at] = flats[at]->present() ? 0 : 1;
  seen = seen.to(pool.device());
  mesh.group(Axis::shard).all_reduce(seen, Reduce::max).wait();
  seen = seen.cpu();
  for (std::size_t at = 0; at < flats.size(); ++at) out[at] = seen.data_ptr<float>()[at] > 0;
  return out;
}

struct Engine::FullParameters::Stay {
  explicit Stay(std::shared_ptr<State> of) : state(std::move(of)), pool(state->pool.device()) {}
  // Also where the scope could not begin, because memory ran out halfway.
  ~Stay() {
    for (auto* flat : pinned) flat->unpin();
    for (auto* flat : came) {
      try {
        flat->await();
      } catch (const std::exception&) {
        // Somebody has heard of it, where it could not begin.
      }
      flat->let_go();
    }
  }

  std::shared_ptr<State> state;
  bool write = false;
  BufferPool pool;                               // lives for the stay only
  std::vector<FlatParameter*> pinned{}, came{};  // `came`: those that were not in before
};

Engine::FullParameters::FullParameters(std::unique_ptr<Stay> stay) : stay_(std::move(stay)) {}
Engine::FullParameters::FullParameters(FullParameters&&) noexcept = default;
Engine::FullParameters::~FullParameters() {
  if (!stay_ || !stay_->write) return;
  for (auto* flat : stay_->pinned) flat->take_values();
  stay_->state->note_writes();
}

Engine::FullParameters Engine::full_parameters(bool write) {
  for (const auto& flat : state_->flats)
    for (const auto& segment : flat->layout().segments)
      require(!write || segment.scales == 0,
              "Engine::full_parameters, to be changed: parameter '{}' is held in eight bits, which are scaled anew in every "
              "update; change it before shard()",
              segment.name);
  auto stay = std::make_unique<FullParameters::Stay>(state_);
  const auto out = state_->out_somewhere();
  for (std::size_t at = 0; at < state_->flats.size(); ++at) {
    auto& flat = state_->flats[at];
    const FlatParameter::Source source{.group = state_->mesh.gathers()};
    if (!flat->present()) {
      stay->came.push_back(flat.get());
      flat->bring_in(stay->pool, source);
    } else if (out[at]) {
      flat->take_part(stay->pool, source);
    }
    flat->pin();
    stay->pinned.push_back(flat.get());
  }
  for (auto& flat : state_->flats) flat->await();
  stay->write = write;
  return FullParameters(std::move(stay));
}

void Engine::release() {
  auto& state = *state_;
  state.meet();
  for (auto& flat : state.flats) {
    flat->require_intact();
    require(!flat->pinned(), "Engine::release inside of Engine::full_parameters: end that scope first");
    state.dissolve(*flat);
    // Memory of their own: what saves one of them would save all of a shared buffer.
    for (auto parameter : flat->parameters()) parameter.set_data(parameter.detach().clone());
    flat.reset();
  }
  for (auto& parameter : state.parameters) {
    parameter.carried.reset();
    parameter.tell_tied();
  }
  state_.reset();
}

void Engine::check_equal() const {
  state_->meet();
  std::vector<NamedTensor> held;
  for (const auto& flat : state_->flats)
    for (const auto& segment : flat->layout().segments) {
      const auto& region = flat->layout().regions[segment.region];
      const Share kept = share_of(region, state_->factors.parameters, state_->mesh.coordinate(Axis::shard));
      const auto begin = std::max(segment.offset, kept.begin);
      const auto end = std::min(segment.offset + segment.elements, kept.begin + kept.length);
      if (begin < end) held.push_back({segment.name, flat->held(segment.region).narrow(0, begin - kept.begin, end - begin)});
    }
  require_same_values(state_->mesh.group(state_->settings.of_copies()), held);
}

const Mesh& Engine::mesh() const { return state_->mesh; }
const ShardOptions& Engine::options() const { return state_->options; }
const plan::Factors& Engine::factors() const { return state_->factors; }
std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() { return state_->flats; }
const std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() const { return state_->flats; }
std::int64_t Engine::layout_version() const { return state_->version; }
double Engine::host_seconds() const { return static_cast<double>(state_->host.total()) * 1e-9; }
std::int64_t Engine::pool_bytes() const { return state_->pool.bytes() + state_->reducer->pool().bytes(); }

Engine shard(const Mesh& mesh, torch::nn::Module& module, ShardOptions options) {
  return Engine(mesh, module, std::move(options));
}

}  // namespace bonfire
