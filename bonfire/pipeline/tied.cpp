#include "bonfire/pipeline/tied.h"

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/freed_storage.h"

namespace bonfire {
namespace {

bool holds(const FlatParameter& flat, const std::string& name) {
  const auto& segments = flat.layout().segments;
  return std::any_of(segments.begin(), segments.end(), [&](const auto& segment) { return segment.name == name; });
}

// The buffer of its own that a group's weights have in every engine.
FlatParameter& flat_of(Engine& engine, const std::string& name) {
  for (auto& flat : engine.flats())
    if (holds(*flat, name)) return *flat;
  fail("the tied weight '{}' is not among the parameters of its stage", name);
}

}  // namespace

std::vector<TieGroup> tie_groups(const Chain& chain, const std::vector<UnitRange>& stages) {
  std::map<std::vector<int>, TieGroup> groups;
  for (const auto& tied : chain.tied) {
    std::map<int, std::string> uses;  // the first on each stage
    for (const auto& use : tied.uses)
      for (int stage = 0; stage < static_cast<int>(stages.size()); ++stage)
        if (stages[static_cast<std::size_t>(stage)].contains(use.unit)) uses.emplace(stage, use.parameter);
    if (uses.size() < 2) continue;
    std::vector<int> on;
    for (const auto& [stage, name] : uses) on.push_back(stage);
    auto& group = groups[on];
    group.stages = on;
    for (const auto& [stage, name] : uses) group.names[stage].push_back(name);
  }
  std::vector<TieGroup> list;
  for (auto& [on, group] : groups) list.push_back(std::move(group));
  return list;
}

Ties::Ties(const Mesh& mesh, std::vector<TieGroup> groups, const schedule::Schedule& table)
    : groups_(std::move(groups)), rank_(mesh.coordinate(Axis::pipeline)) {
  const schedule::Index index(table);
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    std::set<int> on;
    for (const int stage : groups_[at].stages) on.insert(index.find(schedule::Kind::forward, stage, 0).rank);
    places_.emplace_back(on.begin(), on.end());
    ranks_.push_back(on.contains(rank_) ? mesh.pipeline_subgroup(places_.back(), fmt::format("tied weights {}", at))
                                        : Group());
  }
}

void Ties::begin_equal(const std::map<int, torch::nn::Module*>& modules) const {
  const at::NoGradGuard no_grad;
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    const auto& group = groups_[at];
    for (std::size_t weight = 0; weight < group.names.begin()->second.size(); ++weight) {
      std::vector<at::Tensor> copies;
      bool first = false;
      for (const int stage : group.stages) {
        const auto module = modules.find(stage);
        if (module == modules.end()) continue;
        const auto& name = group.of(stage)[weight];
        const auto parameters = module->second->named_parameters();
        const auto* const tensor = parameters.find(name);
        require(tensor, "stage {} has no tied weight '{}'", stage, name);
        // Built in shares: then the builder has seen to equal values.
        if (!has_memory(*tensor)) continue;
        if (stage == group.stages.front()) first = true;
        copies.push_back(*tensor);
      }
      if (copies.empty()) continue;
      // The first stage may be any of the group's ranks.
      auto value = copies.front().detach().clone();
      if (!first) value.zero_();
      ranks_[at].all_reduce(value).wait();
      for (auto& copy : copies) copy.detach().copy_(value);
    }
  }
}

void Ties::sum(std::size_t number, const std::map<int, Engine*>& engines) const {
  const at::NoGradGuard no_grad;
  std::vector<FlatParameter*> copies;
  for (const int stage : groups_[number].stages) {
    const auto found = engines.find(stage);
    if (found == engines.end()) continue;
    found->second->finish_gradients();
    copies.push_back(&flat_of(*found->second, groups_[number].of(stage).front()));
  }
  auto& first = *copies.front();
  for (std::size_t share = 0; share < first.trained().size(); ++share) {
    auto& total = first.trained()[share].gradient;
    for (std::size_t at = 1; at < copies.size(); ++at) total.add_(copies[at]->trained()[share].gradient);
    ranks_[number].all_reduce(total).wait();
    for (std::size_t at = 1; at < copies.size(); ++at) copies[at]->trained()[share].gradient.copy_(total);
  }
}

bool Ties::is_copy(int stage, const FlatParameter& flat) const {
  for (const auto& group : groups_)
    if (group.names.contains(stage) && stage != group.stages.front() && holds(flat, group.of(stage).front())) return true;
  return false;
}

}  // namespace bonfire
