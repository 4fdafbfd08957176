#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"
#include "bonfire/plan/placement.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire {

class Engine;

// Tied weights that are on the same, several stages.
struct TieGroup {
  std::vector<int> stages;                        // in order
  std::map<int, std::vector<std::string>> names;  // by stage: their paths, in one order
  std::vector<std::string> in_model;              // their paths in the whole model: those of their first uses
  const std::vector<std::string>& of(int stage) const { return names.at(stage); }
  std::size_t weights() const { return in_model.size(); }
};

// Which weights of the chain have copies on several of these stages. Throws ConfigError where a use is tied twice.
std::vector<TieGroup> tie_groups(const Chain& chain, const std::vector<UnitRange>& stages);

// Keeps the copies of tied weights on different stages equal: they begin equal, and the gradients of all copies are summed
// before an update.
class Ties {
 public:
  // Collective along the pipeline.
  Ties(const Mesh& mesh, const Chain& chain, const std::vector<UnitRange>& stages, const schedule::Schedule& table);

  const std::vector<TieGroup>& groups() const { return groups_; }
  // Makes all copies equal: to the first stage's. Throws ConfigError, the same on all ranks, where weights that are tied
  // differ in shape or dtype, where only some of them are trained, or where those of one stage are not one tensor.
  // `modules`: of this rank's stages; they live as long as this does. Collective.
  void begin_equal(std::map<int, torch::nn::Module*> modules, at::Device device);
  // A step begins. Throws ConfigError, the same on all ranks, where a weight was frozen or thawed on some of its stages
  // only: the others would wait for its gradient. Collective.
  void require_same_training(at::Device device);
  // What a parameter of a stage is in the whole model: `given`, and of a tied weight also its name, its tie and its copy.
  plan::Placement placement(int stage, const std::string& name, plan::Placement given) const;
  // Throws ConfigError, the same on all ranks, unless the engines read the copies of each weight in one type. Collective.
  void require_same_layout(const std::map<int, Engine*>& engines, at::Device device) const;
  // The gradients of a group's copies, which are those of a whole step, become their sum, from finish() on. `engines`: of
  // this rank's stages. Collective.
  void begin_sum(std::size_t group, const std::map<int, Engine*>& engines);
  // The sums of all groups with this stage. Ranks come to those of different groups in different orders.
  void finish(int stage);
  // Something threw.
  void forget() { sums_.clear(); }

 private:
  using Words = std::vector<std::string>;  // of one stage, one for each of its weights
  // What the rank of every stage says of it, heard by all. Throws what one of them threw.
  std::map<int, Words> heard(const std::function<Words(int stage)>& say, at::Device device) const;
  Words describe(int stage);
  void require_alike(at::Device device);
  void copy_first() const;

  Mesh mesh_;
  std::vector<TiedWeight> tied_;
  std::vector<UnitRange> ranges_;
  std::vector<TieGroup> groups_;
  std::vector<Group> ranks_;  // of each group, where this rank is one of them
  std::vector<int> rank_of_;  // by stage
  struct Sum {
    std::vector<std::vector<at::Tensor>> copies;  // by weight: the gradients that this rank has of it
    std::vector<Work> works;
  };
  std::map<std::size_t, Sum> sums_;  // by group: those that are under way
  std::map<int, torch::nn::Module*> modules_;
  std::map<int, std::vector<std::vector<at::Tensor>>> copies_;  // by stage of this rank, group and weight
};

}  // namespace bonfire
