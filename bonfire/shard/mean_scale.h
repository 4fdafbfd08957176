#pragma once

#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

class Engine;

// Of a Reduction that averages over others than the ranks of its engine, and weighs them alike whatever they count.
class BONFIRE_API AveragesOthers {
 public:
  virtual ~AveragesOthers() = default;
  virtual std::string averaged_by() const = 0;  // "servers, which ..."
};

// For a loss that is the mean over everything that a step counts (targets that are not masked), however ranks and
// microbatches share that: what a sum of losses is multiplied by before Engine::accumulate or Engine::backward, which
// averages over ranks. `count`: of all microbatches of this rank's step together. 0 where no rank counts anything: gradients
// are 0 then. Throws Error where a reduction AveragesOthers. Collective over the data-parallel ranks, one number.
BONFIRE_API double mean_scale(const Engine& engine, double count);

}  // namespace bonfire
