#include "bonfire/shard/engine.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/gradient_slots.h"
#include "bonfire/shard/equality.h"
#include "bonfire/shard/wrap.h"

namespace bonfire {
namespace {

// Where a gradient has just been accumulated.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ArrivalHook(std::function<void()> arrived) : arrived_(std::move(arrived)) {}
  void operator()(const torch::autograd::Variable&) override { arrived_(); }

 private:
  std::function<void()> arrived_;
};

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

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type();
}

}  // namespace

struct Engine::State {
  // One trained or frozen parameter of the module.
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::size_t group = 0;
    at::ScalarType master = at::kFloat;  // the dtype it was given in, which its optimizer state keeps
    bool trained = true;
    std::size_t flat = 0, segment = 0;  // where it lies now
    bool arrived = false;               // in this backward
    std::shared_ptr<FlatSink> sink;     // of layers that can use one
  };

  State(const Mesh& mesh, torch::nn::Module& module, ShardOptions options);
  ~State();

  void lay_out(const std::vector<std::size_t>& order_of_groups, bool first);
  void follow_freezing();
  void arrive(Parameter& parameter);
  at::Tensor sink_buffer(Parameter& parameter, bool& fresh);
  void launch_ready();
  void launch(std::size_t bucket);
  void run_backward(const at::Tensor& loss, bool reduce);
  void begin_pass(bool reduce);
  void end_pass();
  void learn_order();
  void broadcast_buffers();
  void scale_gradients(double factor);

  Mesh mesh;
  ShardOptions options;
  std::shared_ptr<Reduction> reduction;
  std::vector<Parameter> parameters;
  std::vector<std::string> group_names;
  std::vector<at::Tensor> buffers;

  std::vector<std::unique_ptr<FlatParameter>> flats;
  std::vector<std::size_t> order;  // of the groups, as backward finishes them
  std::int64_t version = 0;
  bool spent = false;

  // Of the backward that is running.
  bool running = false, reducing = false;
  std::vector<std::size_t> missing;           // per flat: trained parameters whose gradient has not come yet
  std::vector<std::size_t> missing_in_group;  // per group
  std::vector<std::size_t> finished_groups;   // in order of arrival
  std::size_t next = 0;                       // the first flat that was not launched
  bool learned = false;
};

Engine::State::State(const Mesh& mesh_, torch::nn::Module& module, ShardOptions options_)
    : mesh(mesh_), options(std::move(options_)) {
  for (const Axis axis : {Axis::pipeline, Axis::shard, Axis::context, Axis::tensor})
    if (mesh.shape().along(axis) > 1)
      fail_config(
          "mesh axis {} is {}: this version keeps the whole model on every rank; allowed: 1, with replicate for the ranks",
          name_of(axis), mesh.shape().along(axis));
  const Group& replicas = mesh.group(Axis::replicate);
  reduction = options.hook ? options.hook : make_reduction(replicas, options.reduction);

  for (const auto& unit : groups_of(module)) {
    std::map<at::ScalarType, std::size_t> parts;  // a flat parameter has one dtype
    for (const auto& member : unit.members) {
      // There is one place for a hook, and taking it from its owner would silence that one.
      require(!torch::autograd::impl::post_acc_grad_hooks(member.parameter),
              "parameter '{}' has a gradient hook already: of another Engine, or of yours", member.name);
      for (const auto& tied : member.tied)
        if (!tied.parameter.is_same(member.parameter))
          fail_config("parameters '{}' and '{}' are two tensors over the same memory: register one tensor twice instead",
                      member.name, tied.name);
      const auto [part, fresh] = parts.try_emplace(member.parameter.scalar_type(), group_names.size());
      if (fresh) group_names.push_back(unit.name);
      parameters.push_back(
          {member.name, member.parameter, part->second, member.parameter.scalar_type(), member.parameter.requires_grad()});
    }
  }
  for (const auto& buffer : module.buffers())
    if (buffer.defined() && buffer.numel() > 0) buffers.push_back(buffer);

  std::vector<NamedTensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back({parameter.name, parameter.tensor});
  require_same_structure(replicas, tensors);
  if (options.start == Start::broadcast) {
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : tensors) {
      auto values = tensor.detach().contiguous();
      replicas.broadcast(values, 0).wait();
      tensor.detach().copy_(values);
    }
    broadcast_buffers();
  } else {
    require_same_values(replicas, tensors);
  }

  // Until the first backward has shown better: the reverse of the order of registration.
  std::vector<std::size_t> reversed(group_names.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  lay_out(reversed, true);

  for (auto& parameter : parameters) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor,
                                                   std::make_unique<ArrivalHook>([this, &parameter] { arrive(parameter); }));
    parameter.sink = std::make_shared<FlatSink>(parameter.tensor,
                                                [this, &parameter](bool& fresh) { return sink_buffer(parameter, fresh); });
    set_gradient_sink(module, parameter.name, parameter.sink);
  }
}

Engine::State::~State() {
  for (auto& parameter : parameters) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
    parameter.sink->leave();
  }
}

// Puts the groups, in the order in which backward finishes them, into flat parameters. Groups of different dtypes do not
// share one: each run of equal dtypes is bucketed by itself.
void Engine::State::lay_out(const std::vector<std::size_t>& order_of_groups, bool first) {
  order = order_of_groups;
  std::vector<std::vector<std::size_t>> members(group_names.size());
  for (std::size_t at = 0; at < parameters.size(); ++at) members[parameters[at].group].push_back(at);

  std::vector<std::unique_ptr<FlatParameter>> fresh;
  std::vector<const FlatParameter*> before;
  for (const auto& flat : flats) before.push_back(flat.get());

  for (std::size_t begin = 0; begin < order.size();) {
    const auto dtype_of = [&](std::size_t at) { return parameters[members[order[at]].front()].master; };
    std::size_t end = begin + 1;
    while (end < order.size() && dtype_of(end) == dtype_of(begin)) ++end;

    std::vector<plan::ParameterGroup> groups;
    std::unordered_map<std::string, std::size_t> by_name;
    for (std::size_t at = begin; at < end; ++at) {
      auto& group = groups.emplace_back();
      group.name = group_names[order[at]];
      for (const std::size_t index : members[order[at]]) {
        const auto& parameter = parameters[index];
        group.parameters.push_back(
            {parameter.name, parameter.tensor.numel(), parameter.tensor.sizes().vec(), parameter.trained});
        by_name[parameter.name] = index;
      }
    }
    auto buckets = options.buckets;
    buckets.element_bytes = static_cast<std::int64_t>(c10::elementSize(dtype_of(begin)));
    for (auto& layout : plan::bucket(groups, buckets)) {
      std::vector<at::Tensor> tensors;
      for (std::size_t segment = 0; segment < layout.segments.size(); ++segment) {
        auto& parameter = parameters[by_name.at(layout.segments[segment].name)];
        parameter.flat = fresh.size();
        parameter.segment = segment;
        tensors.push_back(parameter.tensor);
      }
      fresh.push_back(first ? std::make_unique<FlatParameter>(std::move(layout), std::move(tensors),
                                                              options.compute.value_or(dtype_of(begin)))
                            : std::make_unique<FlatParameter>(std::move(layout), std::move(tensors), before));
    }
    begin = end;
  }
  flats = std::move(fresh);
  reduction->reset();
  ++version;
}

// Parameters that were frozen or thawed since the last step move to the other end of their buffers.
void Engine::State::follow_freezing() {
  bool changed = false;
  for (auto& parameter : parameters) {
    if (parameter.trained == parameter.tensor.requires_grad()) continue;
    parameter.trained = !parameter.trained;
    changed = true;
  }
  if (changed) lay_out(order, false);
}

void Engine::State::begin_pass(bool reduce) {
  follow_freezing();
  for (auto& parameter : parameters) {
    parameter.arrived = false;
    if (!parameter.trained) continue;
    if (spent) parameter.tensor.mutable_grad().reset();
    // Somebody else (an optimizer of torch's) may have dropped the gradient as well.
    if (!parameter.tensor.grad().defined()) flats[parameter.flat]->set_written(parameter.segment, false);
  }
  spent = false;
  missing.assign(flats.size(), 0);
  missing_in_group.assign(group_names.size(), 0);
  for (const auto& parameter : parameters)
    if (parameter.trained) ++missing[parameter.flat], ++missing_in_group[parameter.group];
  finished_groups.clear();
  next = 0;
  running = true;
  reducing = reduce;
}

// Stream: the one of the backward operation that made the gradient.
void Engine::State::arrive(Parameter& parameter) {
  require(running,
          "the gradient of '{}' came outside of Engine::backward or Engine::accumulate: call engine.backward(loss) instead "
          "of loss.backward()",
          parameter.name);
  auto& flat = *flats[parameter.flat];
  const auto& gradient = parameter.tensor.grad();
  if (gradient.defined()) {
    const at::NoGradGuard no_grad;
    auto home = flat.view(flat.gradient(), parameter.segment);
    if (!same_memory(gradient, home)) {
      if (flat.written(parameter.segment))
        home.add_(gradient);
      else
        home.copy_(gradient);
      parameter.tensor.mutable_grad() = home;
    }
    flat.set_written(parameter.segment, true);
  } else if (flat.written(parameter.segment)) {
    parameter.tensor.mutable_grad() = flat.view(flat.gradient(), parameter.segment);
  }
  if (std::exchange(parameter.arrived, true) || !reducing) return;
  if (--missing_in_group[parameter.group] == 0) finished_groups.push_back(parameter.group);
  if (--missing[parameter.flat] == 0) launch_ready();
}

at::Tensor Engine::State::sink_buffer(Parameter& parameter, bool& fresh) {
  auto& flat = *flats[parameter.flat];
  fresh = !flat.written(parameter.segment);
  flat.set_written(parameter.segment, true);
  return flat.view(flat.gradient(), parameter.segment);
}

// Buckets are reduced in one order on all ranks, whatever the order in which they get ready here.
void Engine::State::launch_ready() {
  while (next < flats.size() && missing[next] == 0) launch(next++);
}

void Engine::State::launch(std::size_t bucket) {
  auto& flat = *flats[bucket];
  if (flat.layout().trained == 0) return;
  for (std::size_t at = 0; at < flat.layout().segments.size(); ++at) {
    if (!flat.layout().segments[at].trained || flat.written(at)) continue;
    // Not used in this step: it contributes nothing to the average.
    flat.view(flat.gradient(), at).zero_();
    flat.set_written(at, true);
    flat.parameters()[at].mutable_grad() = flat.view(flat.gradient(), at);
  }
  reduction->begin(bucket, flat);
}

void Engine::State::end_pass() {
  running = false;
  if (!reducing) return;
  const at::NoGradGuard no_grad;
  while (next < flats.size()) launch(next++);
  for (const auto stage : {&Reduction::advance, &Reduction::end})
    for (std::size_t at = 0; at < flats.size(); ++at)
      if (flats[at]->layout().trained > 0) ((*reduction).*stage)(at, *flats[at]);
  if (options.keep_buffers_equal) broadcast_buffers();
  if (!learned) learn_order();
}

// All ranks take rank 0's order, once.
void Engine::State::learn_order() {
  learned = true;
  std::vector<std::int64_t> numbers(finished_groups.begin(), finished_groups.end());
  // Groups that did not finish (nothing trained, or unused) come last, as they were.
  for (const std::size_t group : order)
    if (std::find(finished_groups.begin(), finished_groups.end(), group) == finished_groups.end())
      numbers.push_back(static_cast<std::int64_t>(group));
  const Group& replicas = mesh.group(Axis::replicate);
  auto agreed = at::tensor(numbers, at::kLong).to(flats.empty() ? at::Device(at::kCPU) : flats.front()->compute().device());
  replicas.broadcast(agreed, 0).wait();
  const auto on_host = agreed.cpu();
  const std::vector<std::size_t> learned_order(on_host.data_ptr<std::int64_t>(),
                                               on_host.data_ptr<std::int64_t>() + on_host.numel());
  if (learned_order != order) lay_out(learned_order, false);
}

void Engine::State::broadcast_buffers() {
  const Group& replicas = mesh.group(Axis::replicate);
  if (buffers.empty() || replicas.size() == 1) return;
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
  replicas.broadcast(packed, 0).wait();
  if (replicas.rank() == 0) return;
  each([](at::Tensor& buffer, at::Tensor part) {
    auto values = at::empty(buffer.sizes(), buffer.options());
    values.view(-1).view(at::kByte).copy_(part);
    buffer.copy_(values);
  });
}

void Engine::State::scale_gradients(double factor) {
  if (factor == 1) return;
  for (auto& flat : flats) flat->gradient().mul_(factor);
}

void Engine::State::run_backward(const at::Tensor& loss, bool reduce) {
  begin_pass(reduce);
  {
    const TraceScope span(options.trace, "backward", "compute", "compute");
    try {
      loss.backward();
    } catch (...) {
      running = false;
      throw;
    }
  }
  const TraceScope span(options.trace, "wait for reductions", "wait", "compute");
  end_pass();
}

Engine::Engine(const Mesh& mesh, torch::nn::Module& module, ShardOptions options)
    : state_(std::make_unique<State>(mesh, module, std::move(options))) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;

void Engine::accumulate(const at::Tensor& loss) { state_->run_backward(loss, false); }

void Engine::backward(const at::Tensor& loss) {
  const Group& replicas = state_->mesh.group(Axis::replicate);
  const double active = state_->options.uneven_inputs ? replicas.sum(1) : replicas.size();
  state_->run_backward(loss, true);
  state_->scale_gradients(replicas.size() / active);
}

void Engine::finish(const std::function<void()>& step) {
  require(state_->options.uneven_inputs, "Engine::finish needs the option uneven_inputs, so that the other ranks expect it");
  const Group& replicas = state_->mesh.group(Axis::replicate);
  while (true) {
    const double active = replicas.sum(0);
    if (active == 0) return;
    state_->spent = true;
    state_->begin_pass(true);
    state_->end_pass();
    state_->scale_gradients(replicas.size() / active);
    step();
  }
}

void Engine::spend_gradients(const GradientUse& use) {
  state_->spent = true;
  state_->reduction->spent(use);
}

void Engine::check_equal() const {
  std::vector<NamedTensor> tensors;
  for (const auto& parameter : state_->parameters) tensors.push_back({parameter.name, parameter.tensor});
  require_same_values(state_->mesh.group(Axis::replicate), tensors);
}

const Mesh& Engine::mesh() const { return state_->mesh; }
std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() { return state_->flats; }
const std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() const { return state_->flats; }
std::int64_t Engine::layout_version() const { return state_->version; }

Engine shard(const Mesh& mesh, torch::nn::Module& module, ShardOptions options) {
  return Engine(mesh, module, std::move(options));
}

}  // namespace bonfire
