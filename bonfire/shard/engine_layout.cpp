#include <algorithm>
#include <exception>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/engine_state.h"
#include "bonfire/shard/freed_storage.h"
#include "bonfire/shard/guards.h"
#include "bonfire/shard/input_cast.h"

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

at::Device device_of(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters.front().device();
}

// What a build scope has made of the Unit of this group; null where there was none.
std::shared_ptr<PreparedUnit> prepared_in(const ModuleGroup& group) {
  return group.unit ? std::static_pointer_cast<PreparedUnit>(group.unit->prepared()) : nullptr;
}

}  // namespace

Engine::State::State(const Mesh& on, torch::nn::Module& module, ShardOptions asked)
    : settings(on, std::move(asked)),
      memory(options.memory ? options.memory : std::make_shared<EngineMemory>(device_of(module))),
      first_place(memory->engines++ << 20) {
  require(!options.memory || options.driven, "ShardOptions::memory is for modules that a schedule runs (driven)");
  find_parameters(module);
  reduction = options.hook ? options.hook : make_reduction(mesh.group(Axis::replicate), settings.over_replicas());
  reducer.emplace(memory, reduction,
                  ReducerOptions{.shard = mesh.group(Axis::shard),
                                 .wire = settings.scattered_in(),
                                 .whole_gradients = settings.whole_gradients(),
                                 .replicated = settings.replicated(),
                                 // Engines of other stages share the ranks.
                                 .in_company = options.driven,
                                 .must_go_on = [this] { return residency && !joining && residency->ranks_differ(); },
                                 .patience = options.patience});
  start_equal();

  install(module);
  lay_out(likely_order());
}

Engine::State::~State() {
  const bool any = std::any_of(parameters.begin(), parameters.end(), [](const Parameter& one) { return one.trained; });
  const bool unused = any && gradients == Gradients::whole && !settings.gradients_readable();
  if (unused && std::uncaught_exceptions() == 0 && mesh.group(Axis::data).rank() == 0)
    options.log.warning("the gradients of the last Engine::backward were not used: with {} sharded, {}",
                        plan::name_of(options.what), use_our_optimizers);
  leave_module();
}

void Engine::State::leave_module() {
  for (auto& parameter : parameters) {
    for (const auto& tensor : parameter.all()) torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
    if (parameter.sink) parameter.sink->leave();
  }
  for (const auto& seam : seams) *seam.hooks = nullptr;
  seams.clear();
}

void Engine::State::find_parameters(torch::nn::Module& module) {
  // Outputs are cast where the root's forward ends, so that has to be known too.
  if (seams_gather() || options.precision.outputs) require_marked_root(module);
  groups = groups_of(module, options.wrapping);
  if (factors.parameters > 1 && !options.driven && mesh.group(Axis::data).rank() == 0)
    warn_of_one_unit(module, groups, options);
  for (std::size_t group = 0; group < groups.size(); ++group) {
    members.emplace_back();
    const auto prepared = prepared_in(groups[group]);
    for (const auto& member : groups[group].members) {
      // There is one place for a hook, and taking it from its owner would silence that one.
      // A tensor that never needed a gradient cannot even be asked.
      const bool hooked = torch::autograd::impl::get_autograd_meta(member.parameter) &&
                          torch::autograd::impl::post_acc_grad_hooks(member.parameter);
      require(!hooked, "parameter '{}' has a gradient hook already: of another Engine, or of yours", member.name);
      require_on_device(mesh.group(Axis::data), member.name, member.parameter);
      auto own = member.parameter.scalar_type();
      auto compute = settings.compute_type(member.name, member.parameter, own);
      bool trained = member.parameter.requires_grad();
      require(
          prepared || has_memory(member.parameter),
          "parameter '{}' has no memory: its Unit was built in a build scope with other options than shard() was given, or "
          "it was sharded by an Engine that is gone",
          member.name);
      if (prepared) {
        const auto segment = prepared->segment(member.parameter);
        require(
            segment.has_value(),
            "parameter '{}' was not part of its Unit when that was built: parameters that are tied later belong outside of "
            "a build scope",
            member.name);
        own = prepared->own[*segment];
        compute = prepared->flat->layout().segments[*segment].scales > 0
                      ? settings.compute_type(member.name, member.parameter, own)
                      : member.parameter.scalar_type();
        // As it lies now; what was frozen or thawed since is found when training begins.
        trained = prepared->flat->layout().trained(*segment);
      }
      members.back().push_back(parameters.size());
      if (trained && compute == at::kHalf && !options.precision.scaled_loss)
        fail_config(
            "parameter '{}' is trained in fp16, but the loss is not scaled: small gradients would vanish; scale the loss "
            "with "
            "a GradScaler and say so (precision.scaled_loss), or use bf16",
            member.name);
      parameters.push_back({.name = member.name,
                            .tensor = member.parameter,
                            .group = group,
                            .master = own,
                            .compute = compute,
                            .trained = trained,
                            .scales = settings.scales(member.name, member.parameter)});
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
  std::vector<NamedTensor> tensors, whole;
  for (const auto& parameter : parameters) {
    tensors.push_back({parameter.name, parameter.tensor});
    // A build scope has seen to the others.
    if (!prepared_in(groups[parameter.group])) whole.push_back(tensors.back());
  }
  require_same_structure(all, tensors);
  if (options.start == Start::check) return require_same_values(all, whole);
  broadcast_values(all, whole);
  broadcast_buffers();
}

void Engine::State::install(torch::nn::Module& module) {
  for (auto& parameter : parameters) {
    for (const auto& tensor : parameter.all())
      torch::autograd::impl::set_post_acc_grad_hooks(
          tensor, std::make_unique<ArrivalHook>([this, &parameter](const at::Tensor& of) { arrive(parameter, of); }));
    parameter.sink = std::make_shared<FlatSink>(parameter.tensor,
                                                [this, &parameter](bool& fresh) { return sink_buffer(parameter, fresh); });
    // Layers add what they compute in, or two-byte numbers to fp32. Anything else goes through autograd.
    const auto type = settings.whole_gradient_type(parameter.master);
    const bool direct = type == parameter.compute || (type == at::kFloat && c10::elementSize(parameter.compute) == 2);
    if (direct) set_gradient_sink(module, parameter.name, parameter.sink);
    if (parameter.scales == 0) continue;
    // Autograd cannot carry its gradient: that would be in eight bits as well.
    parameter.known_scales = std::make_shared<WeightScales>();
    if (!direct || !parameter.tied.empty() || set_weight_scales(module, parameter.name, parameter.known_scales) != 1)
      fail_config(
          "precision.scales: parameter '{}' is not the weight of one layer that makes its products in fp8 (set_fp8), with "
          "gradients in {} or fp32; allowed: 0",
          parameter.name, c10::toString(parameter.compute));
  }
  const auto& precision = options.precision;
  const bool follows = seams_gather() || precision.outputs || precision.keep;
  // A seam keeps what it is given until forward has ended: none where nothing is rounded.
  const bool rounds = std::any_of(parameters.begin(), parameters.end(),
                                  [](const Parameter& parameter) { return parameter.compute != parameter.master; });
  if (!follows && (!rounds || options.driven)) return;
  const auto hook = [&](UnitHooks& hooks) {
    const auto put = [&](UnitSeam* unit) {
      if (!unit || std::any_of(seams.begin(), seams.end(), [&](const Seam& known) { return known.unit == unit; })) return;
      require(!unit->hooks(), "Unit '{}' is part of another Engine already", unit->module().name());
      unit->set_hooks(&hooks);
      seams.push_back({unit, unit->module().name(), unit->place_of_hooks()});
    };
    for (const auto& group : groups) put(group.unit);
    put(unit_of(module));
  };
  if (!follows) {
    input_cast = std::make_unique<InputCast>(*precision.parameters);
    return hook(*input_cast);
  }

  ResidencyOptions how{.gathers = mesh.gathers(),
                       .meetings = mesh.group(Axis::shard),
                       .free_after_forward = options.reshard_after_forward.free && options.reshard_after_forward.ranks != 1,
                       .prefetch = options.prefetch,
                       .prefetch_before_reduction = options.backward_prefetch == BackwardPrefetch::before_reduction,
                       .negotiate = options.negotiate_order,
                       .debug = options.debug,
                       .inputs = precision.parameters,
                       .outputs = precision.outputs,
                       .log = options.log,
                       .before_pass =
                           [this](bool differentiates) {
                             announce_pass(differentiates);
                             follow_freezing();
                           },
                       .backward_ended = [this](const FlatParameter& flat) { backward_ended(flat); }};
  if (options.reshard_after_forward.ranks > 1) how.kept = mesh.shard_subgroup(options.reshard_after_forward.ranks);
  residency = std::make_shared<Residency>(pool, host, std::move(how));
  hook(*residency);
}

// Puts the groups, in the order in which backward finishes them, into flat parameters. Parameters that already share a
// buffer stay where they are: in which order they lie in it makes no difference.
void Engine::State::lay_out(const std::vector<std::size_t>& order_of_groups) {
  order = order_of_groups;
  std::vector<plan::ParameterGroup> sizes;
  std::unordered_map<std::string, std::size_t> by_name;
  for (const std::size_t group : order) {
    auto& size = sizes.emplace_back();
    size.name = groups[group].name;
    size.apart = groups[group].apart;
    for (const std::size_t index : members[group]) {
      const auto& parameter = parameters[index];
      const auto scales = parameter.trained ? parameter.scales : 0;
      size.parameters.push_back({.name = parameter.name,
                                 .elements = parameter.tensor.numel(),
                                 .shape = parameter.tensor.sizes().vec(),
                                 .trained = parameter.trained,
                                 .compute = scales > 0 ? plan::Dtype::fp8 : plan_dtype(parameter.compute),
                                 .master = plan_dtype(parameter.master),
                                 .scales = scales});
      by_name[parameter.name] = index;
    }
  }
  const auto buckets = settings.buckets(parameters.empty() ? at::kFloat : parameters.front().master);
  std::vector<std::unique_ptr<FlatParameter>> before = std::exchange(flats, {});
  const auto layouts = plan::bucket(sizes, buckets);
  // First what stays: a buffer that is made anew takes its parameters from old ones, which go.
  std::vector<std::unique_ptr<FlatParameter>> made(layouts.size());
  for (std::size_t at = 0; at < layouts.size(); ++at) {
    const auto same = std::find_if(before.begin(), before.end(), [&](const auto& flat) {
      return flat && plan::same_parameters(flat->layout(), layouts[at]);
    });
    if (same != before.end()) made[at] = std::move(*same);
  }
  for (std::size_t at = 0; at < layouts.size(); ++at) {
    if (made[at]) continue;
    std::vector<std::size_t> indices;
    for (const auto& segment : layouts[at].segments) indices.push_back(by_name.at(segment.name));
    for (const std::size_t index : indices)
      if (auto& old = parameters[index].flat; old < before.size() && before[old]) {
        dissolve(*before[old]);
        before[old].reset();
      }
    made[at] = adopt(layouts[at], indices);
    if (!made[at]) made[at] = make_flat(layouts[at], indices);
  }
  flats = std::move(made);
  for (std::size_t flat = 0; flat < flats.size(); ++flat)
    for (std::size_t at = 0; at < flats[flat]->layout().segments.size(); ++at) {
      auto& parameter = parameters[by_name.at(flats[flat]->layout().segments[at].name)];
      parameter.flat = flat;
      parameter.segment = at;
    }
  reduction->reset();
  tell_residency();
  tell_scales();
  note_writes();
  ++version;
}

// The flat parameter that a build scope has made of this Unit, under the names that it has in the whole.
std::unique_ptr<FlatParameter> Engine::State::adopt(const plan::FlatLayout& layout,
                                                    const std::vector<std::size_t>& indices) {
  const auto& group = groups[parameters[indices.front()].group];
  const auto prepared = prepared_in(group);
  if (!prepared) return nullptr;
  bool same = prepared->flat->layout().regions == layout.regions && prepared->flat->parameters().size() == indices.size();
  for (std::size_t at = 0; same && at < indices.size(); ++at)
    same = prepared->flat->parameters()[at].is_same(parameters[indices[at]].tensor);
  require(
      same,
      "Unit '{}' was built in a build scope with another mesh or other options than shard() was given, or its parameters "
      "changed since",
      group.name);
  prepared->flat->rename(layout);
  group.unit->set_prepared(nullptr);
  return std::move(prepared->flat);
}

std::unique_ptr<FlatParameter> Engine::State::make_flat(plan::FlatLayout layout, const std::vector<std::size_t>& indices) {
  std::vector<at::Tensor> tensors;
  for (const std::size_t index : indices) tensors.push_back(parameters[index].tensor);
  auto flat = std::make_unique<FlatParameter>(std::move(layout), std::move(tensors), settings.flat_options());
  for (const std::size_t index : indices) parameters[index].tell_tied();
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
  std::vector<at::Tensor> values(layout.regions.size()), whole_gradients(layout.regions.size());
  for (const auto& share : flat.trained()) {
    if (share.master_apart()) values[share.region] = whole_region(group, share.master.to(flat.device()), factors.optimizer);
    auto& gradient = whole_gradients[share.region];
    if (flat.keeps_whole_gradients()) {
      gradient = flat.gradient(share.region);
      // Reduced, it is the average of all ranks in this rank's share alone; before that it is this rank's own.
      if (gradients == Gradients::whole && factors.optimizer > 1) group.all_gather(gradient, share.gradient).wait();
    } else if (flat.share_written()) {
      gradient = whole_region(group, share.gradient, factors.gradients);
    }
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
    const auto& gradient = whole_gradients[segment.region];
    if (gradient.defined() && (!flat.keeps_whole_gradients() || flat.written(at))) parameter.carried = part(gradient);
    parameter.tensor.mutable_grad().reset();
  }
}

void Engine::State::tell_scales() {
  for (auto& parameter : parameters)
    if (parameter.known_scales) parameter.known_scales->inverse = flats[parameter.flat]->inverse_scales(parameter.segment);
}

// Whatever the engine changes, a flat parameter counts, and so does autograd.
std::int64_t Engine::State::writes_of_others(const Parameter& parameter) const {
  return static_cast<std::int64_t>(parameter.tensor._version()) - flats[parameter.flat]->generation();
}

void Engine::State::note_writes() {
  for (auto& parameter : parameters) {
    const auto& flat = *flats[parameter.flat];
    const auto region = flat.layout().segments[parameter.segment].region;
    parameter.copied = !parameter.tensor.is_inference() &&
                       std::any_of(flat.trained().begin(), flat.trained().end(),
                                   [&](const auto& share) { return share.region == region && share.master_apart(); });
    if (parameter.copied) parameter.writes = writes_of_others(parameter);
  }
}

void Engine::State::require_unwritten() const {
  for (const auto& parameter : parameters) {
    if (!parameter.copied || flats[parameter.flat]->pinned() || parameter.writes == writes_of_others(parameter)) continue;
    meet();
    fail(
        "parameter '{}' was written to: forward reads it as {}, a copy of the {} that are trained, and those did not "
        "change; "
        "update with an optimizer of Bonfire's (AdamW, Adam, Sgd) in place of torch::optim, and change values inside of "
        "Engine::full_parameters(/*write=*/true)",
        parameter.name, c10::toString(parameter.compute), c10::toString(parameter.master));
  }
}

void Engine::State::tell_residency() {
  if (!residency) return;
  std::vector<Residency::Home> homes;
  for (const auto& seam : seams) {
    Residency::Home home{.unit = seam.unit, .name = seam.name};
    for (std::size_t group = 0; group < groups.size(); ++group) {
      if (groups[group].unit != seam.unit || members[group].empty()) continue;
      home.name = groups[group].name.empty() ? "root" : groups[group].name;
      if (seams_gather()) home.flat = flats[parameters[members[group].front()].flat].get();
    }
    homes.push_back(std::move(home));
  }
  residency->set_units(homes);
}

// Until a backward has shown better: the reverse of the order of registration.
std::vector<std::size_t> Engine::State::likely_order() const {
  std::vector<std::size_t> reversed(groups.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  // Last what has no gradients: it is never finished.
  std::stable_partition(reversed.begin(), reversed.end(), [&](std::size_t group) {
    return std::any_of(members[group].begin(), members[group].end(), [&](auto at) { return parameters[at].trained; });
  });
  return reversed;
}

// Parameters that were frozen or thawed since the last step move to other regions.
void Engine::State::follow_freezing() {
  bool changed = false, thawed = false;
  for (auto& parameter : parameters) {
    if (parameter.trained == parameter.tensor.requires_grad()) continue;
    parameter.trained = !parameter.trained;
    changed = true;
    thawed = thawed || parameter.trained;
  }
  if (!changed) return;
  // When the order was learned, what is thawed now was never finished, and came last.
  lay_out(thawed ? likely_order() : order);
  // Backward may have to go further than before, or less far, and finishes other groups first.
  learned = false;
  if (residency) residency->forget_courses();
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
