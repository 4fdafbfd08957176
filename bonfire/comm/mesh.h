#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/group.h"

namespace bonfire {

// How many ranks along each axis; their product is the number of ranks. Slowest axis first.
struct BONFIRE_API MeshShape {
  int pipeline = 1;
  int replicate = 1;
  int shard = 1;
  int context = 1;
  int tensor = 1;

  int size() const { return pipeline * replicate * shard * context * tensor; }
  int along(Axis axis) const;  // data: replicate * shard; world: all
};

// The ranks of a World, or some of them, laid out along named axes: a value handle.
class BONFIRE_API Mesh {
 public:
  const MeshShape& shape() const;
  // This rank's place along an axis.
  int coordinate(Axis axis) const;
  // The ranks along `axis` that share this rank's other coordinates.
  const Group& group(Axis axis) const;
  // The shard axis once more, over a communicator of its own: gathers neither queue behind the reductions of group(shard),
  // nor need they be issued in one order with them.
  const Group& gathers() const;
  // The ranks along `axis`, replicate or data, and along the context axis, over a communicator of their own; without a
  // context axis those along `axis`. Counted among the collectives of `axis`, and behind its link. Collective among them,
  // the first time.
  Group with_context(Axis axis) const;
  // The ranks at these places of the pipeline axis, over a communicator of their own: one for each name and list of places.
  // Collective among them, the first time. REQUIRES: this rank is one of them.
  Group pipeline_subgroup(const std::vector<int>& places, const std::string& name) const;
  // The same mesh with the given axis behind an emulated link. All groups of one axis share the link: they queue on it
  // together, in the order in which their collectives are issued.
  [[nodiscard]] Mesh over(Axis axis, const Link& link) const;

  struct State;
  explicit Mesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace bonfire
