#include "bonfire/shard/wrap.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/nn/unit.h"
#include "bonfire/shard/wrapping_names.h"

namespace bonfire {
namespace {

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The module as the wrapping sees it: its Units, and its parameters with the Units around each of their uses.
class Survey {
 public:
  Survey(torch::nn::Module& root, const Wrapping& wrapping) : wrapping_(wrapping) {
    units_.push_back({"", unit_of(root), 0});
    if (units_[0].seam) unit_index_[units_[0].seam] = 0;
    visit(root, {.path = "", .units = {0}});
    require_known_names(wrapping, names_of(root), "this module");
  }

  std::vector<ModuleGroup> groups();
  std::vector<ModuleBuffer> buffers() { return std::move(buffers_); }

 private:
  using Nesting = std::vector<std::size_t>;  // Units, each inside the one before it; the root is the first

  struct Entry {
    std::string path;
    UnitSeam* seam;
    std::size_t depth;
    bool chosen = true;
  };
  struct Parameter {
    ModuleGroup::Member member;
    std::vector<Nesting> uses;
    bool ignored = false;
  };
  struct Place {
    std::string path;
    Nesting units;
    std::string ignored_by{};  // the path of the ignored module around it
    bool ignored = false;
  };

  void visit(torch::nn::Module& module, const Place& place);
  Place enter(torch::nn::Module& child, torch::nn::Module& parent, Place place);
  void meet(const std::string& name, const at::Tensor& tensor, const Place& place);
  bool wants(const Entry& unit) const;
  std::size_t owner(const Parameter& parameter) const;
  void drop_small_units();
  void refuse_partial_overlap() const;

  const Wrapping& wrapping_;
  std::vector<Entry> units_;  // in the order in which they are met; [0] is the root, marked or not
  std::unordered_map<const UnitSeam*, std::size_t> unit_index_;
  std::vector<Parameter> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_tensor_;
  using Memory = std::tuple<const c10::StorageImpl*, std::int64_t, at::ScalarType, std::vector<std::int64_t>,
                            std::vector<std::int64_t>>;
  std::map<Memory, std::size_t> by_memory_;
  std::vector<ModuleBuffer> buffers_;
  std::unordered_set<const c10::TensorImpl*> seen_buffers_;
};

void Survey::visit(torch::nn::Module& module, const Place& place) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    meet(join(place.path, item.key()), item.value(), place);
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    if (!place.ignored && item.value().defined() && seen_buffers_.insert(item.value().unsafeGetTensorImpl()).second)
      buffers_.push_back({join(place.path, item.key()), item.value()});
  for (const auto& child : module.named_children()) {
    Place inside = place;
    inside.path = join(place.path, child.key());
    visit(*child.value(), enter(*child.value(), module, std::move(inside)));
  }
}

Survey::Place Survey::enter(torch::nn::Module& child, torch::nn::Module& parent, Place place) {
  const bool named = contains(wrapping_.ignored_modules, place.path) || (wrapping_.ignored && wrapping_.ignored(place.path));
  if (UnitSeam* const seam = unit_of(child, parent)) {
    const auto [at, fresh] = unit_index_.try_emplace(seam, units_.size());
    if (fresh) {
      auto& unit = units_.emplace_back(Entry{place.path, seam, place.units.size()});
      unit.chosen = wants(unit);
    }
    if (place.ignored && units_[at->second].chosen)
      fail_config(
          "Unit '{}' ({}) lies inside the ignored module '{}': ignore less, or keep it out of the wrapping by types or "
          "predicate",
          place.path, seam->type_name(), place.ignored_by);
    place.units.push_back(at->second);
  }
  if (named && !place.ignored) {
    place.ignored = true;
    place.ignored_by = place.path;
  }
  return place;
}

bool Survey::wants(const Entry& unit) const {
  if (wrapping_.all_in_one) return false;
  if (wrapping_.predicate) return wrapping_.predicate(unit.path, unit.seam->module());
  return wrapping_.types.empty() || contains(wrapping_.types, unit.seam->type_name());
}

void Survey::meet(const std::string& name, const at::Tensor& tensor, const Place& place) {
  // One without elements has nothing to shard, to reduce or to update.
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.numel() == 0) return;
  auto [at, fresh] = by_tensor_.try_emplace(tensor.unsafeGetTensorImpl(), parameters_.size());
  if (fresh && tensor.has_storage() && tensor.numel() > 0) {
    const auto [same, first] =
        by_memory_.try_emplace(Memory{tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.scalar_type(),
                                      tensor.sizes().vec(), tensor.strides().vec()},
                               at->second);
    at->second = same->second;
    fresh = first;
  }
  if (fresh)
    parameters_.push_back({{name, tensor}, {}});
  else
    parameters_[at->second].member.tied.push_back({name, tensor});
  auto& parameter = parameters_[at->second];
  parameter.uses.push_back(place.units);
  parameter.ignored = parameter.ignored || place.ignored || contains(wrapping_.ignored_parameters, name) ||
                      (wrapping_.ignored && wrapping_.ignored(name));
}

// The innermost chosen Unit that every use lies in. A Unit that is itself at several places contains the uses at each.
std::size_t Survey::owner(const Parameter& parameter) const {
  const Nesting& first = parameter.uses.front();
  for (auto unit = first.rbegin(); unit != first.rend(); ++unit)
    if (units_[*unit].chosen && std::all_of(parameter.uses.begin(), parameter.uses.end(), [&](const Nesting& use) {
          return std::find(use.begin(), use.end(), *unit) != use.end();
        }))
      return *unit;
  return 0;
}

// From the inside out, so that a Unit is judged with what has joined it.
void Survey::drop_small_units() {
  std::size_t depth = 0;
  for (const auto& unit : units_) depth = std::max(depth, unit.depth);
  for (; depth > 0 && wrapping_.min_parameters > 0; --depth) {
    std::vector<std::int64_t> own(units_.size());
    for (const auto& parameter : parameters_)
      if (!parameter.ignored) own[owner(parameter)] += parameter.member.parameter.numel();
    for (std::size_t at = 1; at < units_.size(); ++at)
      if (units_[at].depth == depth && own[at] < wrapping_.min_parameters) units_[at].chosen = false;
  }
}

std::vector<ModuleGroup> Survey::groups() {
  refuse_partial_overlap();
  drop_small_units();
  const bool without_units = units_.size() == 1 && !units_[0].seam;
  std::vector<ModuleGroup> all;
  if (!without_units || wrapping_.all_in_one)
    for (const auto& unit : units_) all.push_back({unit.path, {}, unit.seam});
  for (auto& parameter : parameters_) {
    if (parameter.ignored) continue;
    if (without_units && !wrapping_.all_in_one)
      all.push_back({parameter.member.name, {std::move(parameter.member)}});
    else
      all[owner(parameter)].members.push_back(std::move(parameter.member));
  }
  std::erase_if(all, [](const ModuleGroup& group) { return group.members.empty(); });
  return all;
}

void Survey::refuse_partial_overlap() const {
  struct Extent {
    const c10::StorageImpl* storage;
    std::int64_t begin, end;  // bytes
    const Parameter* parameter;
  };
  std::vector<Extent> extents;
  for (const auto& parameter : parameters_) {
    const auto& tensor = parameter.member.parameter;
    if (!tensor.has_storage() || tensor.numel() == 0) continue;
    std::int64_t elements = 1;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto begin = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
    extents.push_back({tensor.storage().unsafeGetStorageImpl(), begin,
                       begin + elements * static_cast<std::int64_t>(tensor.element_size()), &parameter});
  }
  std::stable_sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
  });
  const Extent* reaching = nullptr;  // of those before, the one with the last end
  for (const auto& extent : extents) {
    const bool same = reaching && reaching->storage == extent.storage;
    if (same && extent.begin < reaching->end && !(reaching->parameter->ignored && extent.parameter->ignored))
      fail_config("parameters '{}' and '{}' share a part of their memory: tie them as one tensor, or give each its own",
                  reaching->parameter->member.name, extent.parameter->member.name);
    if (!same || extent.end > reaching->end) reaching = &extent;
  }
}

void require_one_policy(const Wrapping& wrapping) {
  if (wrapping.min_parameters < 0)
    fail_config("wrapping min_parameters is {}; allowed: 0 and more", wrapping.min_parameters);
  const bool rules = !wrapping.types.empty() || wrapping.min_parameters > 0;
  if (wrapping.predicate && rules)
    fail_config("wrapping has both a predicate and types or min_parameters, which the predicate replaces: choose one");
  if (wrapping.all_in_one && (rules || wrapping.predicate))
    fail_config(
        "wrapping has both all_in_one and types, min_parameters or a predicate, which all_in_one replaces: choose one");
}

}  // namespace

std::vector<ModuleGroup> groups_of(torch::nn::Module& module, const Wrapping& wrapping) {
  require_one_policy(wrapping);
  return Survey(module, wrapping).groups();
}

std::vector<ModuleBuffer> buffers_of(torch::nn::Module& module, const Wrapping& wrapping) {
  return Survey(module, wrapping).buffers();
}

void require_marked_root(torch::nn::Module& module) {
  if (!unit_of(module))
    fail_config("the root ({}) is not a Unit, so the engine is not told when it runs: declare it with BONFIRE_UNIT",
                short_type_name(typeid(module)));
}

}  // namespace bonfire
