#include "bonfire/shard/build_scope.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/shard/parameter_layout.h"

namespace bonfire {
namespace {

enum class Without { units, prepared_units };

// The floating-point parameters below `module`, without those of Units inside it, or of those that have taken theirs.
void collect(torch::nn::Module& module, const std::string& path, Without without, std::vector<NamedTensor>& into) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    const auto& tensor = item.value();
    const bool met =
        std::any_of(into.begin(), into.end(), [&](const NamedTensor& one) { return one.tensor.is_same(tensor); });
    if (tensor.defined() && tensor.is_floating_point() && tensor.numel() > 0 && !met)
      into.push_back({path + item.key(), tensor});
  }
  for (const auto& child : module.named_children()) {
    const UnitSeam* const unit = unit_of(*child.value(), module);
    if (!unit || (without == Without::prepared_units && !unit->prepared()))
      collect(*child.value(), path + child.key() + ".", without, into);
  }
}

// The Units inside `module`, innermost first.
template <class Visit>
void each_unit_inside(torch::nn::Module& module, const Visit& visit) {
  for (const auto& child : module.named_children()) {
    each_unit_inside(*child.value(), visit);
    if (UnitSeam* const unit = unit_of(*child.value(), module)) visit(*unit);
  }
}

}  // namespace

std::optional<std::size_t> PreparedUnit::segment(const at::Tensor& parameter) const {
  const auto& members = flat->parameters();
  for (std::size_t at = 0; at < members.size(); ++at)
    if (members[at].is_same(parameter)) return at;
  return std::nullopt;
}

Build::Build(const DataGroups& groups, const ShardOptions& options, InitUnit init)
    : settings_(groups, options), init_(std::move(init)), observing_(*this) {
  const auto& wrapping = options.wrapping;
  if (!settings_.comes_and_goes()) return;
  if (options.unit)
    fail_config("a build scope does not know the paths of Units that ShardOptions::unit asks for; allowed: one of the two");
  if (wrapping.predicate || wrapping.ignored || !wrapping.ignored_modules.empty() || !wrapping.ignored_parameters.empty())
    fail_config(
        "a build scope does not know the paths of Units that a wrapping's predicate or ignored modules ask for; "
        "allowed in it: types, min_parameters, all_in_one");
}

void Build::constructed(UnitSeam& unit) {
  numbers_[&unit] = built_++;
  // Those inside it may have got parameters after they were constructed, as a Sequential does to which children are pushed.
  each_unit_inside(unit.module(), [this](UnitSeam& inner) { initialize(inner, /*again=*/true); });
  initialize(unit, /*again=*/false);
  // Later it could not be moved any more.
  if (const auto device = settings_.groups.all.state().device; !device.is_cpu()) unit.module().to(device);
  each_unit_inside(unit.module(), [this](UnitSeam& inner) { prepare(inner); });
  prepare(unit);
}

Build::Known& Build::known(const at::Tensor& parameter) {
  auto* const tensor = parameter.unsafeGetTensorImpl();
  return known_.try_emplace(tensor, Known{c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr())})
      .first->second;
}

void Build::initialize(UnitSeam& unit, bool again) {
  // Units from before the scope have their values.
  if (!init_ || !numbers_.contains(&unit)) return;
  const at::NoGradGuard no_grad;
  BuiltUnit built{.number = numbers_.at(&unit), .type = unit.type_name(), .parameters = {}};
  collect(unit.module(), "", Without::units, built.parameters);
  std::erase_if(built.parameters,
                [this](const NamedTensor& one) { return std::exchange(known(one.tensor).initialized, true); });
  if (!again || !built.parameters.empty()) init_(built);
}

void Build::prepare(UnitSeam& unit) {
  if (unit.prepared() || !numbers_.contains(&unit)) return;
  const auto& wrapping = settings_.options.wrapping;
  const auto& types = wrapping.types;
  const bool chosen = types.empty() || std::find(types.begin(), types.end(), unit.type_name()) != types.end();
  if (!settings_.comes_and_goes() || wrapping.all_in_one || !chosen) return;
  std::vector<NamedTensor> tensors;
  collect(unit.module(), "", Without::prepared_units, tensors);
  std::int64_t elements = 0;
  for (const auto& [name, tensor] : tensors) elements += tensor.numel();
  if (tensors.empty() || elements < wrapping.min_parameters) return;
  for (const auto& [name, tensor] : tensors) {
    auto& owner = known(tensor).owner;
    require(
        owner.empty(),
        "parameter '{}' of Unit {} belongs to a Unit {} that was built before: in a build scope register a tied parameter "
        "in the Unit around both",
        name, unit.type_name(), owner);
    owner = unit.type_name();
  }

  const Group& all = settings_.groups.all;
  if (settings_.options.start == Start::broadcast)
    broadcast_values(all, tensors);
  else
    require_same_values(all, tensors);

  std::vector<NamedTensor> unsplit;
  for (const auto& one : tensors)
    if (!settings_.placement(one.name, one.tensor).split()) unsplit.push_back(one);
  require_same_values(settings_.groups.splits, unsplit);

  PreparedUnit prepared;
  plan::ParameterGroup group{unit.type_name(), {}};
  for (const auto& [name, tensor] : tensors) {
    const LaidParameter parameter{.name = name,
                                  .tensor = tensor,
                                  .master = tensor.scalar_type(),
                                  .compute = settings_.compute_type(name, tensor, tensor.scalar_type()),
                                  .trained = tensor.requires_grad(),
                                  .scales = tensor.requires_grad() ? settings_.scales(name, tensor) : 0,
                                  .placement = settings_.placement(name, tensor)};
    prepared.own.push_back(parameter.master);
    group.parameters.push_back(parameter.size());
  }
  auto layout = plan::bucket({group}, settings_.buckets(prepared.own.front())).front();
  // In the order of the segments.
  std::vector<at::Tensor> parameters;
  std::vector<at::ScalarType> own;
  for (const auto& segment : layout.segments) {
    const auto at =
        std::find_if(tensors.begin(), tensors.end(), [&](const NamedTensor& one) { return one.name == segment.name; });
    parameters.push_back(at->tensor);
    own.push_back(prepared.own[static_cast<std::size_t>(at - tensors.begin())]);
  }
  prepared.own = std::move(own);
  prepared.flat = std::make_unique<FlatParameter>(std::move(layout), std::move(parameters), settings_.flat_options());
  unit.set_prepared(std::make_shared<PreparedUnit>(std::move(prepared)));
}

}  // namespace bonfire
