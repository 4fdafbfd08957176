#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"

// Where an engine's parameters lie: which of them share a flat buffer, and how they move to others.
namespace bonfire {
namespace {

// Where a gradient has just been accumulated.
class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit ArrivalHook(std::function<void(const at::Tensor&)> arrived) : arrived_(std::move(arrived)) {}
  void operator()(const torch::autograd::Variable& tensor) override { arrived_(tensor); }

 private:
  std::function<void(const at::Tensor&)> arrived_;
};

std::optional<at::ScalarType> wire_of(const ShardOptions& options) {
  if (options.precision.reduction) return options.precision.reduction;
  if (options.reduction.compression == plan::Compression::bf16) return at::kBFloat16;
  if (options.reduction.compression == plan::Compression::fp16) return at::kHalf;
  return std::nullopt;
}

// Over the replicas gradients travel in the same numbers.
ReductionOptions over_replicas(const ShardOptions& options) {
  auto reduction = options.reduction;
  if (reduction.compression == plan::Compression::none && options.precision.reduction == at::kBFloat16)
    reduction.compression = plan::Compression::bf16;
  if (reduction.compression == plan::Compression::none && options.precision.reduction == at::kHalf)
    reduction.compression = plan::Compression::fp16;
  return reduction;
}

}  // namespace

Engine::State::State(const Mesh& mesh_, torch::nn::Module& module, ShardOptions options_)
    : mesh(mesh_),
      options(std::move(options_)),
      factors(plan::factors_of(options.what, mesh.shape().shard, options.accumulation)),
      wire(wire_of(options)),
      pool(module.parameters().empty() ? at::Device(at::kCPU) : module.parameters().front().device()) {
  check_options();
  const Group& replicas = mesh.group(Axis::replicate);
  reduction = options.hook ? options.hook : make_reduction(replicas, over_replicas(options));
  reducer.emplace(pool.device(), reduction,
                  ReducerOptions{.shard = mesh.group(Axis::shard),
                                 .wire = wire,
                                 .whole_gradients = static_cast<std::size_t>(std::max(2, options.prefetch + 1))});
  find_parameters(module);
  start_equal();

  // Until the first backward has shown better: the reverse of the order of registration.
  std::vector<std::size_t> reversed(groups.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  install(module);
  lay_out(reversed);
}

Engine::State::~State() {
  for (auto& parameter : parameters) {
    for (const auto& tensor : parameter.all()) torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
    if (parameter.sink) parameter.sink->leave();
  }
  for (auto* seam : seams) seam->set_hooks(nullptr);
}

void Engine::State::check_options() {
  for (const Axis axis : {Axis::pipeline, Axis::context, Axis::tensor})
    if (mesh.shape().along(axis) > 1)
      fail_config("mesh axis {} is {}: this version keeps whole layers on every rank; allowed: 1", name_of(axis),
                  mesh.shape().along(axis));
  if (options.prefetch < 0) fail_config("prefetch is {}; allowed: 0 or more Units", options.prefetch);
  if (options.precision.parameters == at::kHalf && !options.precision.scaled_loss)
    fail_config("precision.parameters is fp16, but the loss is not scaled: small gradients would vanish; scale the loss with a "
                "GradScaler and say so (precision.scaled_loss), or use bf16");
  if (options.reduction.compression == plan::Compression::powersgd && mesh.shape().shard > 1)
    fail_config("PowerSGD with a sharding factor of {}: it needs whole matrices; allowed: a factor of 1", mesh.shape().shard);
  if (options.offload == Offload::parameters && factors.parameters != mesh.shape().shard)
    fail_config("offload of parameters with {} sharded and a factor of {}; allowed: sharded = parameters, or a factor of 1",
                plan::name_of(options.what), mesh.shape().shard);
  const int to = options.reshard_after_forward.ranks;
  if (to > 0 && mesh.shape().shard % to != 0)
    fail_config("reshard_after_forward = {} does not divide the sharding factor {}", to, mesh.shape().shard);
}

void Engine::State::find_parameters(torch::nn::Module& module) {
  if (comes_and_goes()) require_marked_root(module);
  groups = groups_of(module, options.wrapping);
  for (std::size_t group = 0; group < groups.size(); ++group) {
    members.emplace_back();
    for (const auto& member : groups[group].members) {
      // There is one place for a hook, and taking it from its owner would silence that one.
      require(!torch::autograd::impl::post_acc_grad_hooks(member.parameter),
              "parameter '{}' has a gradient hook already: of another Engine, or of yours", member.name);
      const auto own = member.parameter.scalar_type();
      const bool keeps = options.precision.keep && options.precision.keep(member.name, member.parameter);
      members.back().push_back(parameters.size());
      parameters.push_back({.name = member.name,
                            .tensor = member.parameter,
                            .group = group,
                            .master = own,
                            .compute = keeps ? own : options.precision.parameters.value_or(own),
                            .trained = member.parameter.requires_grad()});
      for (const auto& tied : member.tied)
        if (!tied.parameter.is_same(member.parameter)) parameters.back().tied.push_back(tied.parameter);
    }
  }
  for (auto& buffer : buffers_of(module, options.wrapping)) {
    if (!buffer.defined() || buffer.numel() == 0) continue;
    if (options.precision.buffers && buffer.is_floating_point())
      buffer.set_data(buffer.detach().to(*options.precision.buffers));
    buffers.push_back(buffer);
  }
}

void Engine::State::start_equal() {
  const Group& all = mesh.group(Axis::data);
  std::vector<NamedTensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back({parameter.name, parameter.tensor});
  require_same_structure(all, tensors);
  if (options.start == Start::check) return require_same_values(all, tensors);
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : tensors) {
    auto values = tensor.detach().contiguous();
    all.broadcast(values, 0).wait();
    tensor.detach().copy_(values);
  }
  broadcast_buffers();
}

void Engine::State::install(torch::nn::Module& module) {
  for (auto& parameter : parameters) {
    for (const auto& tensor : parameter.all())
      torch::autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>([this, &parameter](const at::Tensor& of) { arrive(parameter, of); }));
    parameter.sink = std::make_shared<FlatSink>(parameter.tensor,
                                                [this, &parameter](bool& fresh) { return sink_buffer(parameter, fresh); });
    set_gradient_sink(module, parameter.name, parameter.sink);
  }
  const auto& precision = options.precision;
  if (!comes_and_goes() && !precision.outputs && !precision.keep) return;

  ResidencyOptions how{.gathers = mesh.gathers(),
                       .free_after_forward = options.reshard_after_forward.free,
                       .prefetch = options.prefetch,
                       .prefetch_before_reduction = options.backward_prefetch == BackwardPrefetch::before_reduction,
                       .negotiate = options.negotiate_order,
                       .debug = options.debug,
                       .inputs = precision.parameters,
                       .outputs = precision.outputs,
                       .log = options.log,
                       .before_pass = [this] { follow_freezing(); }};
  if (options.reshard_after_forward.ranks > 1) how.kept = mesh.shard_subgroup(options.reshard_after_forward.ranks);
  residency = std::make_shared<Residency>(pool, std::move(how));
  for (const auto& group : groups)
    if (group.unit && std::find(seams.begin(), seams.end(), group.unit) == seams.end()) seams.push_back(group.unit);
  if (auto* root = unit_of(module); root && std::find(seams.begin(), seams.end(), root) == seams.end()) seams.push_back(root);
  for (auto* seam : seams) {
    require(!seam->hooks(), "Unit '{}' is part of another Engine already", seam->module().name());
    seam->set_hooks(residency.get());
  }
}

// Puts the groups, in the order in which backward finishes them, into flat parameters. Those that already lie as they should
// stay as they are.
void Engine::State::lay_out(const std::vector<std::size_t>& order_of_groups) {
  order = order_of_groups;
  std::vector<plan::ParameterGroup> sizes;
  std::unordered_map<std::string, std::size_t> by_name;
  for (const std::size_t group : order) {
    auto& size = sizes.emplace_back();
    size.name = groups[group].name;
    for (const std::size_t index : members[group]) {
      const auto& parameter = parameters[index];
      size.parameters.push_back({.name = parameter.name,
                                 .elements = parameter.tensor.numel(),
                                 .shape = parameter.tensor.sizes().vec(),
                                 .trained = parameter.trained,
                                 .compute = plan_dtype(parameter.compute),
                                 .master = plan_dtype(parameter.master)});
      by_name[parameter.name] = index;
    }
  }
  auto buckets = options.buckets;
  buckets.gradient = parameters.empty() ? plan::Dtype::fp32 : plan_dtype(parameters.front().master);
  buckets.parts = mesh.shape().along(Axis::data);
  buckets.one_per_group = comes_and_goes();

  std::vector<std::unique_ptr<FlatParameter>> before = std::exchange(flats, {});
  std::vector<std::pair<std::size_t, std::size_t>> places(parameters.size());  // flat and segment
  for (auto& layout : plan::bucket(sizes, buckets)) {
    std::vector<std::size_t> indices;
    for (std::size_t at = 0; at < layout.segments.size(); ++at) {
      indices.push_back(by_name.at(layout.segments[at].name));
      places[indices.back()] = {flats.size(), at};
    }
    const auto same = std::find_if(before.begin(), before.end(), [&](const auto& flat) {
      return flat && flat->layout().segments == layout.segments && flat->layout().regions == layout.regions;
    });
    if (same != before.end()) {
      flats.push_back(std::move(*same));
      continue;
    }
    for (const std::size_t index : indices)
      if (auto& old = parameters[index].flat; old < before.size() && before[old]) {
        dissolve(*before[old]);
        before[old].reset();
      }
    flats.push_back(make_flat(std::move(layout), indices));
  }
  for (std::size_t at = 0; at < parameters.size(); ++at)
    std::tie(parameters[at].flat, parameters[at].segment) = places[at];
  reduction->reset();
  tell_residency();
  ++version;
}

std::unique_ptr<FlatParameter> Engine::State::make_flat(plan::FlatLayout layout, const std::vector<std::size_t>& indices) {
  std::vector<at::Tensor> tensors;
  for (const std::size_t index : indices) tensors.push_back(parameters[index].tensor);
  FlatOptions how{.factors = factors,
                  .rank = mesh.coordinate(Axis::shard),
                  .gradient = options.precision.gradients,
                  .travelling = wire};
  if (options.offload == Offload::parameters) how.shard_device = at::kCPU;
  if (options.offload != Offload::none) how.master_device = at::kCPU;
  auto flat = std::make_unique<FlatParameter>(std::move(layout), std::move(tensors), how);
  for (const std::size_t index : indices)
    for (auto& tied : parameters[index].tied) tied.set_data(parameters[index].tensor.detach());
  const at::NoGradGuard no_grad;
  for (std::size_t segment = 0; segment < indices.size(); ++segment) {
    auto& parameter = parameters[indices[segment]];
    const auto gradient = std::exchange(parameter.carried, {});
    if (!gradient.defined() || !parameter.trained) continue;
    if (flat->keeps_whole_gradients()) {
      flat->gradient_view(segment).copy_(gradient);
      flat->set_written(segment, true);
      parameter.tensor.mutable_grad() = flat->gradient_view(segment);
    }
    for (const auto& share : flat->trained())
      if (share.region == flat->layout().segments[segment].region)
        put_segment(share.gradient, share.share, flat->layout().segments[segment], gradient);
    flat->set_share_written(true);
  }
  return flat;
}

// Gives the parameters of a flat buffer that is to go memory of their own again, whole and in their own type, and remembers
// the gradients that were accumulated. Collective.
void Engine::State::dissolve(const FlatParameter& flat) {
  const at::NoGradGuard no_grad;
  const Group& group = mesh.group(Axis::shard);
  const auto& layout = flat.layout();
  std::vector<at::Tensor> values(layout.regions.size()), gradients(layout.regions.size());
  for (const auto& share : flat.trained()) {
    values[share.region] = whole_region(group, share.master.to(flat.device()), factors.optimizer);
    if (flat.keeps_whole_gradients())
      gradients[share.region] = flat.gradient(share.region);
    else if (flat.share_written())
      gradients[share.region] = whole_region(group, share.gradient, factors.gradients);
  }
  for (std::size_t at = 0; at < layout.regions.size(); ++at)
    if (!values[at].defined()) values[at] = whole_region(group, flat.held(at).to(flat.device()), factors.parameters);
  for (std::size_t at = 0; at < layout.segments.size(); ++at) {
    const auto& segment = layout.segments[at];
    auto& parameter = *std::find_if(parameters.begin(), parameters.end(),
                                    [&](const Parameter& other) { return other.name == segment.name; });
    const auto part = [&](const at::Tensor& region) {
      return region.narrow(0, segment.offset, segment.elements).view(parameter.tensor.sizes());
    };
    parameter.tensor.set_data(part(values[segment.region]).to(parameter.master));
    const bool accumulated = gradients[segment.region].defined() && (!flat.keeps_whole_gradients() || flat.written(at));
    if (accumulated) parameter.carried = part(gradients[segment.region]).clone();
    parameter.tensor.mutable_grad().reset();
  }
}

void Engine::State::tell_residency() {
  if (!residency) return;
  std::vector<Residency::Home> homes;
  for (auto* seam : seams) {
    Residency::Home home{.unit = seam, .name = seam->module().name()};
    for (std::size_t group = 0; group < groups.size(); ++group) {
      if (groups[group].unit != seam || members[group].empty()) continue;
      home.name = groups[group].name.empty() ? "root" : groups[group].name;
      if (comes_and_goes()) home.flat = flats[parameters[members[group].front()].flat].get();
    }
    homes.push_back(std::move(home));
  }
  residency->set_units(homes);
}

// Parameters that were frozen or thawed since the last step move to other regions.
void Engine::State::follow_freezing() {
  bool changed = false;
  for (auto& parameter : parameters) {
    if (parameter.trained == parameter.tensor.requires_grad()) continue;
    parameter.trained = !parameter.trained;
    changed = true;
  }
  if (changed) lay_out(order);
}

// All ranks take rank 0's order, once.
void Engine::State::learn_order() {
  learned = true;
  std::vector<std::int64_t> numbers(finished_groups.begin(), finished_groups.end());
  // Groups that did not finish (nothing trained, or unused) come last, as they were.
  for (const std::size_t group : order)
    if (std::find(finished_groups.begin(), finished_groups.end(), group) == finished_groups.end())
      numbers.push_back(static_cast<std::int64_t>(group));
  auto agreed = at::tensor(numbers, at::kLong).to(pool.device());
  mesh.group(Axis::data).broadcast(agreed, 0).wait();
  const auto on_host = agreed.cpu();
  const std::vector<std::size_t> learned_order(on_host.data_ptr<std::int64_t>(),
                                               on_host.data_ptr<std::int64_t>() + on_host.numel());
  if (learned_order != order) lay_out(learned_order);
}

}  // namespace bonfire
