#pragma once

#include <array>
#include <memory>
#include <vector>

#include "bonfire/comm/group.h"
#include "bonfire/comm/mesh.h"

namespace bonfire {

class Communicators;

inline constexpr std::size_t axis_count = static_cast<std::size_t>(Axis::world) + 1;

struct Mesh::State {
  MeshShape shape;
  std::array<Group, axis_count> groups;
  Group gathers;
  std::shared_ptr<Communicators> communicators;
  std::vector<int> part;  // its ranks, where these are not all of the World's
};

// Places of a mesh that differ from place `rank` along `axis` only, in order. `data` and `world` span several axes.
BONFIRE_API std::vector<int> ranks_along(const MeshShape& shape, Axis axis, int rank);
// The same along several axes, none of which spans others.
BONFIRE_API std::vector<int> ranks_along(const MeshShape& shape, const std::vector<Axis>& along, int rank);

}  // namespace bonfire
