#include "bonfire/shard/parameter_layout.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/freed_storage.h"
#include "bonfire/shard/guards.h"

namespace bonfire {
namespace {

// What a build scope has made of the Unit of this group; null where there was none.
std::shared_ptr<PreparedUnit> prepared_in(const ModuleGroup& group) {
  return group.unit ? std::static_pointer_cast<PreparedUnit>(group.unit->prepared()) : nullptr;
}

}  // namespace

plan::ParameterSize LaidParameter::size() const {
  const bool scaled = trained && scales > 0;
  return {.name = name,
          .elements = tensor.numel(),
          .shape = tensor.sizes().vec(),
          .trained = trained,
          .compute = scaled ? plan::Dtype::fp8 : plan_dtype(compute),
          .master = plan_dtype(master),
          .scales = scaled ? scales : 0,
          .placement = placement};
}

ParameterLayout::ParameterLayout(const ShardSettings& settings, torch::nn::Module& module)
    : settings_(settings), groups_(groups_of(module, settings.options.wrapping)) {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    members_.emplace_back();
    const auto prepared = prepared_in(groups_[group]);
    const auto& own_options =
        unit_options_.emplace_back(settings.options.unit && groups_[group].unit
                                       ? settings.options.unit(groups_[group].name, groups_[group].unit->module())
                                       : UnitOptions{});
    settings.require_possible(groups_[group].name, own_options);
    for (const auto& member : groups_[group].members) {
      // There is one place for a hook, and taking it from its owner would silence that one.
      // A tensor that never needed a gradient cannot even be asked.
      const bool hooked = torch::autograd::impl::get_autograd_meta(member.parameter) &&
                          torch::autograd::impl::post_acc_grad_hooks(member.parameter);
      require(!hooked, "parameter '{}' has a gradient hook already: of another Engine, or of yours", member.name);
      require_on_device(settings_.groups.all, member.name, member.parameter);
      auto own = member.parameter.scalar_type();
      auto compute = settings_.compute_type(member.name, member.parameter, own, own_options);
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
                      ? settings_.compute_type(member.name, member.parameter, own, own_options)
                      : member.parameter.scalar_type();
        // As it lies now; what was frozen or thawed since is found when training begins.
        trained = prepared->flat->layout().trained(*segment);
      }
      members_.back().push_back(parameters_.size());
      if (trained && compute == at::kHalf && !settings_.options.precision.scaled_loss)
        fail_config(
            "parameter '{}' is trained in fp16, but the loss is not scaled: small gradients would vanish; scale the loss "
            "with "
            "a GradScaler and say so (precision.scaled_loss), or use bf16",
            member.name);
      parameters_.push_back({.name = member.name,
                             .tensor = member.parameter,
                             .group = group,
                             .master = own,
                             .compute = compute,
                             .trained = trained,
                             .scales = settings_.scales(member.name, member.parameter),
                             .placement = settings_.placement(member.name, member.parameter)});
      for (const auto& tied : member.tied)
        if (!tied.parameter.is_same(member.parameter)) parameters_.back().tied.push_back(tied.parameter);
    }
  }
}

bool ParameterLayout::prepared(const LaidParameter& parameter) const {
  return prepared_in(groups_[parameter.group]) != nullptr;
}

std::size_t ParameterLayout::index_of(const FlatParameter& flat) const {
  return static_cast<std::size_t>(
      std::find_if(flats_.begin(), flats_.end(), [&](const auto& other) { return other.get() == &flat; }) - flats_.begin());
}

FlatParameter* ParameterLayout::flat_of(std::size_t group) const {
  return members_[group].empty() ? nullptr : flats_[parameters_[members_[group].front()].flat].get();
}

void ParameterLayout::lay_out(const std::vector<std::size_t>& order, bool averaged) {
  order_ = order;
  std::vector<plan::ParameterGroup> sizes;
  std::unordered_map<std::string, std::size_t> by_name;
  for (const std::size_t group : order) {
    auto& size = sizes.emplace_back();
    size.name = groups_[group].name;
    for (const std::size_t index : members_[group]) {
      size.parameters.push_back(parameters_[index].size());
      by_name[parameters_[index].name] = index;
    }
  }
  const auto buckets = settings_.buckets(parameters_.empty() ? at::kFloat : parameters_.front().master);
  std::vector<std::unique_ptr<FlatParameter>> before = std::exchange(flats_, {});
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
      if (auto& old = parameters_[index].flat; old < before.size() && before[old]) {
        dissolve(*before[old], averaged);
        before[old].reset();
      }
    made[at] = adopt(layouts[at], indices);
    if (!made[at]) made[at] = make_flat(layouts[at], indices);
  }
  flats_ = std::move(made);
  for (std::size_t flat = 0; flat < flats_.size(); ++flat)
    for (std::size_t at = 0; at < flats_[flat]->layout().segments.size(); ++at) {
      auto& parameter = parameters_[by_name.at(flats_[flat]->layout().segments[at].name)];
      parameter.flat = flat;
      parameter.segment = at;
    }
  tell_scales();
  note_writes();
  ++version_;
}

// The flat parameter that a build scope has made of this Unit, under the names that it has in the whole.
std::unique_ptr<FlatParameter> ParameterLayout::adopt(const plan::FlatLayout& layout,
                                                      const std::vector<std::size_t>& indices) {
  const auto& group = groups_[parameters_[indices.front()].group];
  const auto prepared = prepared_in(group);
  if (!prepared) return nullptr;
  bool same = prepared->flat->layout().regions == layout.regions && prepared->flat->parameters().size() == indices.size();
  for (std::size_t at = 0; same && at < indices.size(); ++at)
    same = prepared->flat->parameters()[at].is_same(parameters_[indices[at]].tensor);
  require(
      same,
      "Unit '{}' was built in a build scope with another mesh or other options than shard() was given, or its parameters "
      "changed since",
      group.name);
  prepared->flat->rename(layout);
  group.unit->set_prepared(nullptr);
  return std::move(prepared->flat);
}

std::unique_ptr<FlatParameter> ParameterLayout::make_flat(plan::FlatLayout layout, const std::vector<std::size_t>& indices) {
  std::vector<at::Tensor> tensors;
  for (const std::size_t index : indices) tensors.push_back(parameters_[index].tensor);
  auto options = settings_.flat_options();
  options.first_generation = next_generation_;
  auto flat = std::make_unique<FlatParameter>(std::move(layout), std::move(tensors), options);
  for (const std::size_t index : indices) parameters_[index].tell_tied();
  const at::NoGradGuard no_grad;
  for (std::size_t segment = 0; segment < indices.size(); ++segment) {
    auto& parameter = parameters_[indices[segment]];
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
void ParameterLayout::dissolve(const FlatParameter& flat, bool averaged) {
  const at::NoGradGuard no_grad;
  next_generation_ = std::max(next_generation_, flat.generation() + 1);
  const Group& group = settings_.groups.shards;
  const auto& layout = flat.layout();
  std::vector<at::Tensor> values(layout.regions.size()), whole_gradients(layout.regions.size());
  for (const auto& share : flat.trained()) {
    if (share.copy.defined())
      values[share.region] = whole_region(group, share.master.to(flat.device()), settings_.factors.optimizer);
    auto& gradient = whole_gradients[share.region];
    if (flat.keeps_whole_gradients()) {
      gradient = flat.gradient(share.region);
      // Reduced, it is the average of all ranks in this rank's share alone; before that it is this rank's own.
      if (averaged && settings_.factors.optimizer > 1) group.all_gather(gradient, share.gradient).wait();
    } else if (flat.share_written()) {
      gradient = whole_region(group, share.gradient, settings_.factors.gradients);
    }
  }
  for (std::size_t at = 0; at < layout.regions.size(); ++at)
    if (!values[at].defined())
      values[at] = whole_region(group, flat.held(at).to(flat.device()), settings_.factors.parameters);
  for (std::size_t at = 0; at < layout.segments.size(); ++at) {
    const auto& segment = layout.segments[at];
    auto& parameter = *std::find_if(parameters_.begin(), parameters_.end(),
                                    [&](const LaidParameter& other) { return other.name == segment.name; });
    const auto part = [&](const at::Tensor& region) {
      return region.narrow(0, segment.offset, segment.elements).view(parameter.tensor.sizes());
    };
    parameter.tensor.set_data(part(values[segment.region]).to(parameter.master));
    const auto& gradient = whole_gradients[segment.region];
    if (gradient.defined() && (!flat.keeps_whole_gradients() || flat.written(at))) parameter.carried = part(gradient);
    parameter.tensor.mutable_grad().reset();
  }
}

void ParameterLayout::tell_scales() {
  for (auto& parameter : parameters_)
    if (parameter.known_scales) parameter.known_scales->inverse = flats_[parameter.flat]->codec().inverse(parameter.segment);
}

std::int64_t ParameterLayout::writes_of_others(const LaidParameter& parameter) const {
  return static_cast<std::int64_t>(parameter.tensor._version()) - flats_[parameter.flat]->told_autograd();
}

void ParameterLayout::note_writes() {
  for (auto& parameter : parameters_) {
    const auto& flat = *flats_[parameter.flat];
    const auto region = flat.layout().segments[parameter.segment].region;
    parameter.copied = !parameter.tensor.is_inference() &&
                       std::any_of(flat.trained().begin(), flat.trained().end(),
                                   [&](const auto& share) { return share.region == region && share.copy.defined(); });
    if (parameter.copied) parameter.writes = writes_of_others(parameter);
  }
}

const LaidParameter* ParameterLayout::written_by_others() const {
  for (const auto& parameter : parameters_)
    if (parameter.copied && !flats_[parameter.flat]->pinned() && parameter.writes != writes_of_others(parameter))
      return &parameter;
  return nullptr;
}

std::vector<std::size_t> ParameterLayout::likely_order() const {
  std::vector<std::size_t> reversed(groups_.size());
  std::iota(reversed.rbegin(), reversed.rend(), std::size_t{0});
  // Last what has no gradients: it is never finished.
  std::stable_partition(reversed.begin(), reversed.end(), [&](std::size_t group) {
    return std::any_of(members_[group].begin(), members_[group].end(), [&](auto at) { return parameters_[at].trained; });
  });
  return reversed;
}

ParameterLayout::Change ParameterLayout::note_training() {
  Change change;
  for (auto& parameter : parameters_) {
    if (parameter.trained == parameter.tensor.requires_grad()) continue;
    parameter.trained = !parameter.trained;
    change.any = true;
    change.thawed = change.thawed || parameter.trained;
  }
  return change;
}

void ParameterLayout::release(bool averaged) {
  for (auto& flat : flats_) {
    dissolve(*flat, averaged);
    // Memory of their own: what saves one of them would save all of a shared buffer.
    for (auto parameter : flat->parameters()) parameter.set_data(parameter.detach().clone());
    flat.reset();
  }
  for (auto& parameter : parameters_) {
    parameter.carried.reset();
    parameter.tell_tied();
  }
}

}  // namespace bonfire
