#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/group.h"

namespace bonfire {

// How many ranks along each axis; their product is the size of the World. Slowest axis first.
struct BONFIRE_API MeshShape {
  int pipeline = 1;
  int replicate = 1;
  int shard = 1;
  int context = 1;
  int tensor = 1;

  int size() const { return pipeline * replicate * shard * context * tensor; }
  int along(Axis axis) const;  // data: replicate * shard; world: all
};

// The ranks of a World laid out along named axes: a value handle.
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
  // The `ranks` consecutive members of the shard axis to which this rank belongs, over a communicator of their own.
  // Collective for each size, the first time. Throws ConfigError where `ranks` does not divide the axis.
  Group shard_subgroup(int ranks) const;
  // The ranks at these places of the pipeline axis, over a communicator of their own: one for each name and list of places.
  // Collective among them, the first time. REQUIRES: this rank is one of them.
  Group pipeline_subgroup(const std::vector<int>& places, const std::string& name) const;
  // The same mesh with the given axis behind an emulated link. All groups of one axis share the link: they queue on it
  // together, in the order in which their collectives are issued.
  [[nodiscard]] Mesh over(Axis axis, const Link& link) const;

  // This rank failed between collectives, and says why: others hear it where they wait for this one. True: all ranks of the
  // World failed at the same `place`, a number that says what they have issued, so that they may go on. Otherwise their
  // groups throw from now on. Waits for the others, no longer than `patience`.
  bool all_failed_alike(const std::string& words, std::int64_t place, std::chrono::milliseconds patience) const;

  struct State;
  explicit Mesh(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace bonfire
