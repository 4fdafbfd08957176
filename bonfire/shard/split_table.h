#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/nn/sequence_regions.h"
#include "bonfire/plan/model.h"
#include "bonfire/plan/placement.h"

namespace bonfire {

using plan::Split;

// How the parameters with such names are split.
struct SplitRule {
  std::string match{};  // * stands for any letters: "*.up"
  Split split = Split::rows;
  // Of a packed weight that is split by rows: the rows of each of the weights on top of each other in it, each of which is
  // split by itself. Empty: it is one.
  std::vector<std::int64_t> parts{};
};

// How the ranks along a mesh's tensor axis split the layers of a module of your own: a value. The first rule that matches a
// parameter's name counts; what matches none, every rank has whole. What is split must be divisible by the ranks.
class BONFIRE_API SplitTable {
 public:
  // `sequence`: what lies between split layers is divided along the sequence.
  SplitTable(const Mesh& mesh, std::vector<SplitRule> rules, bool sequence = false);

  // For the layers, which exchange something.
  const TensorRanks& ranks() const { return ranks_; }
  // What this rank has of a parameter, given all of it: a tensor of its own. Throws ConfigError where it cannot be split.
  at::Tensor own(const std::string& name, const at::Tensor& whole) const;
  // ShardOptions::placement, of parameters that own() was asked for under names that the same rule matches.
  std::function<plan::Placement(const std::string& name, const at::Tensor& own)> placement() const;

 private:
  std::vector<SplitRule> rules_;
  TensorRanks ranks_;
};

}  // namespace bonfire
