#pragma once

#include <map>
#include <string>
#include <vector>

#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire {

class Engine;
class FlatParameter;

// Tied weights that are on the same, several stages.
struct TieGroup {
  std::vector<int> stages;                        // in order
  std::map<int, std::vector<std::string>> names;  // by stage: their paths, in one order
  const std::vector<std::string>& of(int stage) const { return names.at(stage); }
};

// Which weights of the chain have copies on several of these stages.
std::vector<TieGroup> tie_groups(const Chain& chain, const std::vector<UnitRange>& stages);

// Keeps the copies of tied weights on different stages equal: they begin equal, and the gradients of all copies are summed
// before an update.
class Ties {
 public:
  // Collective along the pipeline.
  Ties(const Mesh& mesh, std::vector<TieGroup> groups, const schedule::Schedule& table);

  const std::vector<TieGroup>& groups() const { return groups_; }
  // All copies take the values of the first stage's. `modules`: of this rank's stages. Collective.
  void begin_equal(const std::map<int, torch::nn::Module*>& modules) const;
  // The gradients of a group's copies become their sum. `engines`: of this rank's stages. Collective.
  void sum(std::size_t group, const std::map<int, Engine*>& engines) const;
  // Whether this buffer of a stage is a copy of another stage's, so that its gradient is counted there.
  bool is_copy(int stage, const FlatParameter& flat) const;

 private:
  std::vector<TieGroup> groups_;
  std::vector<Group> ranks_;  // of each group, where this rank is one of them
  std::vector<std::vector<int>> places_;
  int rank_;
};

}  // namespace bonfire
