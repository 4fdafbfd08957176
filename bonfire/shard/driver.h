#pragma once

#include "bonfire/shard/flat_parameter.h"

namespace bonfire {

// Who takes a module's flat parameters through a step: the seams of a user's module, or a pipeline's schedule. Both use the
// verbs of FlatGroup; this is what a FlatGroup asks of them in turn.
class Driver {
 public:
  virtual ~Driver() = default;

  // Parameters lie elsewhere from now on.
  virtual void laid_out() {}
  // Other parameters are trained than before: a step will go another way.
  virtual void training_changed() {}
  // All ranks come to the same place between Units, wherever each of them was. Returns whether they may hold different ones.
  // Collective.
  virtual bool meet() { return false; }
  // Ranks were seen to run different Units at the same time: those that are ahead must not wait for the others.
  virtual bool ranks_differ() const { return false; }
  // This rank is about to reduce these gradients. Others may need something of it first.
  virtual void before_reduction(const FlatParameter& /*flat*/) {}
  // An update is about to change the parameters. Collective.
  virtual void before_update() {}
  // Something threw: the step is over on this rank.
  virtual void abandon() {}
};

}  // namespace bonfire
