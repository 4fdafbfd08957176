#include "bonfire/pipeline/tied.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/hear.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/freed_storage.h"

namespace bonfire {
namespace {

// What weight `weight` of group `group` is called on all of its stages.
std::string tie_of(std::size_t group, std::size_t weight) { return fmt::format("{}.{}", group, weight); }

// A tied weight has a region of its own in one of the buffers of its stage.
struct Home {
  FlatParameter* flat = nullptr;
  std::size_t region = 0;
};
// Without a buffer where the weight is not trained with the others.
Home find_home(Engine& engine, const std::string& tie) {
  for (auto& flat : engine.flats())
    for (std::size_t at = 0; at < flat->layout().regions.size(); ++at)
      if (flat->layout().regions[at].tie == tie) return {flat.get(), at};
  return {};
}
Home home_of(Engine& engine, const std::string& tie) {
  const auto home = find_home(engine, tie);
  require(home.flat, "the tied weight {} is not among the parameters of its stage", tie);
  return home;
}

bool same_tensor(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other) || (one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
                                one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes());
}

int stage_with(const std::vector<UnitRange>& stages, int unit) {
  for (std::size_t stage = 0; stage < stages.size(); ++stage)
    if (stages[stage].contains(unit)) return static_cast<int>(stage);
  fail_config("Chain::tied names Unit {}; the model has {}", unit, stages.empty() ? 0 : stages.back().end);
}

}  // namespace

std::vector<TieGroup> tie_groups(const Chain& chain, const std::vector<UnitRange>& stages) {
  std::map<std::vector<int>, TieGroup> groups;
  std::set<std::pair<int, std::string>> seen;
  for (const auto& tied : chain.tied) {
    std::map<int, std::string> uses;  // the first on each stage
    for (const auto& use : tied.uses) {
      if (!seen.emplace(use.unit, use.parameter).second)
        fail_config("Chain::tied names '{}' of Unit {} twice: list all uses of one weight together, each once",
                    use.parameter, use.unit);
      uses.emplace(stage_with(stages, use.unit), use.parameter);
    }
    if (uses.size() < 2) continue;
    std::vector<int> on;
    for (const auto& [stage, name] : uses) on.push_back(stage);
    auto& group = groups[on];
    group.stages = on;
    for (const auto& [stage, name] : uses) group.names[stage].push_back(name);
    const auto first = std::min_element(tied.uses.begin(), tied.uses.end(),
                                        [](const auto& one, const auto& other) { return one.unit < other.unit; });
    group.in_model.push_back(first->parameter);
  }
  std::vector<TieGroup> list;
  for (auto& [on, group] : groups) list.push_back(std::move(group));
  return list;
}

Ties::Ties(const Mesh& mesh, const Chain& chain, const std::vector<UnitRange>& stages, const schedule::Schedule& table)
    : mesh_(mesh), tied_(chain.tied), ranges_(stages), groups_(tie_groups(chain, stages)) {
  const schedule::Index index(table);
  for (int stage = 0; stage < table.stages; ++stage) rank_of_.push_back(index.find(schedule::Kind::forward, stage, 0).rank);
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    std::set<int> on;
    for (const int stage : groups_[at].stages) on.insert(rank_of_[static_cast<std::size_t>(stage)]);
    ranks_.push_back(on.contains(mesh.coordinate(Axis::pipeline))
                         ? mesh.pipeline_subgroup({on.begin(), on.end()}, fmt::format("tied weights {}", at))
                         : Group());
  }
}

std::map<int, Ties::Words> Ties::heard(const std::function<Words(int stage)>& say, at::Device device) const {
  std::map<int, Words> all;
  for (int stage = 0; stage < static_cast<int>(ranges_.size()); ++stage) {
    const int from = rank_of_[static_cast<std::size_t>(stage)];
    std::string said;
    if (from == mesh_.coordinate(Axis::pipeline)) {
      try {
        for (const auto& word : say(stage)) said += word + '\n';
      } catch (const ConfigError& error) {
        said = std::string("!") + error.what();
      }
    }
    said = hear(mesh_.group(Axis::pipeline), said, from, device);
    if (said.starts_with("!")) fail_config("{}", said.substr(1));
    std::istringstream lines(said);
    for (std::string line; std::getline(lines, line);) all[stage].push_back(line);
  }
  return all;
}

// Shapes of the weights of a stage that are tied to others, group by group.
Ties::Words Ties::describe(int stage) {
  const auto parameters = modules_.at(stage)->named_parameters();
  for (const auto& tied : tied_) {
    const TiedWeight::Use* first = nullptr;
    for (const auto& use : tied.uses) {
      if (!ranges_[static_cast<std::size_t>(stage)].contains(use.unit)) continue;
      const auto* const tensor = parameters.find(use.parameter);
      if (!first && !tensor)
        fail_config("stage {} has no parameter '{}', which Chain::tied names of Unit {}", stage, use.parameter, use.unit);
      if (first && tensor && !same_tensor(parameters[first->parameter], *tensor))
        fail_config("stage {}: '{}' and '{}' are tied, and are two tensors; both Units must hold the same one", stage,
                    first->parameter, use.parameter);
      if (!first) first = &use;
    }
  }
  Words words;
  auto& copies = copies_[stage];
  copies.assign(groups_.size(), {});
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    auto& group = groups_[at];
    if (!group.names.contains(stage)) continue;
    for (auto& name : group.names.at(stage)) {
      const auto& tensor = copies[at].emplace_back(parameters[name]);
      words.push_back(fmt::format("{} [{}], {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                                  tensor.requires_grad() ? "trained" : "frozen"));
      // Flat buffers name a parameter as it is met first.
      for (const auto& item : parameters)
        if (same_tensor(item.value(), tensor)) {
          name = item.key();
          break;
        }
    }
  }
  return words;
}

void Ties::begin_equal(std::map<int, torch::nn::Module*> modules, at::Device device) {
  modules_ = std::move(modules);
  if (tied_.empty()) return;
  require_alike(device);
  copy_first();
}

void Ties::require_alike(at::Device device) {
  const auto given = groups_;  // names as they were given, for messages
  const auto words = heard([&](int stage) { return describe(stage); }, device);
  std::map<int, std::size_t> next;  // by stage: its first weight of the group
  for (const auto& group : given) {
    const int first = group.stages.front();
    for (const int stage : group.stages)
      for (std::size_t weight = 0; weight < group.of(stage).size(); ++weight) {
        const auto& here = words.at(stage)[next[stage] + weight];
        const auto& there = words.at(first)[next[first] + weight];
        if (here != there)
          fail_config("'{}' of stage {} is {}; '{}' of stage {}, to which it is tied, is {}: they must be alike",
                      group.of(stage)[weight], stage, here, group.of(first)[weight], first, there);
      }
    for (const int stage : group.stages) next[stage] += group.of(stage).size();
  }
}

void Ties::require_same_training(at::Device device) {
  std::int64_t weights = 0;
  for (const auto& group : groups_) weights += static_cast<std::int64_t>(group.weights());
  if (weights == 0) return;
  // Of each weight, whether it is frozen anywhere, and whether it is trained anywhere.
  const auto seen = at::zeros({weights, 2}, at::kFloat);
  for (const auto& [stage, copies] : copies_) {
    auto* row = seen.data_ptr<float>();
    for (std::size_t group = 0; group < groups_.size(); row += 2 * groups_[group++].weights())
      for (std::size_t weight = 0; weight < copies[group].size(); ++weight)
        row[2 * weight + (copies[group][weight].requires_grad() ? 1 : 0)] = 1;
  }
  const auto everywhere = seen.to(device);
  mesh_.group(Axis::pipeline).all_reduce(everywhere, Reduce::max).wait();
  if (everywhere.sum().item<float>() == static_cast<float>(weights)) return;
  require_alike(device);
  fail("tied weights are frozen on some of their stages");
}

void Ties::copy_first() const {
  const at::NoGradGuard no_grad;
  for (std::size_t at = 0; at < groups_.size(); ++at) {
    const auto& group = groups_[at];
    for (std::size_t weight = 0; weight < group.weights(); ++weight) {
      std::vector<at::Tensor> copies;
      bool first = false;
      for (const auto& [stage, mine] : copies_) {
        // Built in shares: then the builder has seen to equal values.
        if (!group.names.contains(stage) || !has_memory(mine[at][weight])) continue;
        if (stage == group.stages.front()) first = true;
        copies.push_back(mine[at][weight]);
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

plan::Placement Ties::placement(int stage, const std::string& name, plan::Placement given) const {
  for (std::size_t number = 0; number < groups_.size(); ++number) {
    const auto& group = groups_[number];
    if (!group.names.contains(stage)) continue;
    const auto& names = group.of(stage);
    const auto weight = static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (weight == names.size()) continue;
    const auto& [first, last] = std::pair(group.stages.begin(), group.stages.end());
    given.name = group.in_model[weight];
    given.tie = tie_of(number, weight);
    given.copy = given.copy * static_cast<int>(last - first) + static_cast<int>(std::find(first, last, stage) - first);
    break;
  }
  return given;
}

void Ties::require_same_layout(const std::map<int, Engine*>& engines, at::Device device) const {
  if (groups_.empty()) return;
  const auto words = heard(
      [&](int stage) {
        Words lines;
        for (std::size_t group = 0; group < groups_.size(); ++group) {
          if (!groups_[group].names.contains(stage)) continue;
          for (std::size_t weight = 0; weight < groups_[group].weights(); ++weight) {
            const auto [flat, region] = find_home(*engines.at(stage), tie_of(group, weight));
            if (!flat)
              fail_config(
                  "'{}' of stage {} is ignored, and tied to weights of other stages: nobody would keep them equal; allowed: "
                  "one of the two",
                  groups_[group].of(stage)[weight], stage);
            const auto& kind = flat->layout().regions[region];
            lines.push_back(fmt::format("{} of {}", kind.elements, plan::name_of(kind.compute)));
          }
        }
        return lines;
      },
      device);
  std::map<int, std::size_t> next;
  for (const auto& group : groups_) {
    const int first = group.stages.front();
    for (const int stage : group.stages)
      for (std::size_t weight = 0; weight < group.weights(); ++weight)
        if (words.at(stage)[next[stage] + weight] != words.at(first)[next[first] + weight])
          fail_config(
              "the tied weight '{}' of stage {} is not read in the same number format as '{}' of stage {}: let "
              "precision.keep and precision.scales answer alike for both",
              group.of(stage)[weight], stage, group.of(first)[weight], first);
    for (const int stage : group.stages) next[stage] += group.weights();
  }
}

void Ties::begin_sum(std::size_t number, const std::map<int, Engine*>& engines) {
  const at::NoGradGuard no_grad;
  auto& [copies, works] = sums_[number];
  for (std::size_t weight = 0; weight < groups_[number].weights(); ++weight) {
    auto& gradients = copies.emplace_back();
    for (const int stage : groups_[number].stages) {
      const auto engine = engines.find(stage);
      if (engine == engines.end()) continue;
      const auto home = home_of(*engine->second, tie_of(number, weight));
      for (const auto& share : home.flat->trained())
        if (share.region == home.region) gradients.push_back(share.gradient);
    }
    if (gradients.empty()) continue;  // frozen
    for (std::size_t at = 1; at < gradients.size(); ++at) gradients.front().add_(gradients[at]);
    works.push_back(ranks_[number].all_reduce(gradients.front()));
  }
}

void Ties::finish(int stage) {
  const at::NoGradGuard no_grad;
  for (std::size_t number = 0; number < groups_.size(); ++number) {
    if (!groups_[number].names.contains(stage)) continue;
    const auto node = sums_.extract(number);
    if (node.empty()) continue;
    for (auto& work : node.mapped().works) work.wait();
    for (const auto& gradients : node.mapped().copies)
      for (std::size_t at = 1; at < gradients.size(); ++at) gradients[at].copy_(gradients.front());
  }
}

}  // namespace bonfire
