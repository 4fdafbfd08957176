#include "bonfire/comm/mesh.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/communicators.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/comm/mesh_state.h"

namespace bonfire {

int MeshShape::along(Axis axis) const {
  switch (axis) {
    case Axis::pipeline: return pipeline;
    case Axis::replicate: return replicate;
    case Axis::shard: return shard;
    case Axis::context: return context;
    case Axis::tensor: return tensor;
    case Axis::data: return replicate * shard;
    case Axis::world: return size();
  }
  return 1;
}

const MeshShape& Mesh::shape() const { return state_->shape; }
const Group& Mesh::group(Axis axis) const { return state_->groups.at(static_cast<std::size_t>(axis)); }
const Group& Mesh::gathers() const { return state_->gathers; }
int Mesh::coordinate(Axis axis) const { return group(axis).rank(); }

Mesh Mesh::over(Axis axis, const Link& link) const {
  auto state = std::make_shared<State>(*state_);
  const auto emulated = std::make_shared<EmulatedLink>(link);
  auto& group = state->groups.at(static_cast<std::size_t>(axis));
  group = group.over(emulated);
  if (axis == Axis::shard) state->gathers = state->gathers.over(emulated);
  return Mesh(std::move(state));
}

Group Mesh::with_context(Axis axis) const {
  require(axis == Axis::replicate || axis == Axis::data, "axis {} with that of context; allowed: replicate | data",
          name_of(axis));
  const Group& along = group(axis);
  if (shape().context == 1) return along;
  std::vector<Axis> axes{Axis::replicate, Axis::context};
  if (axis == Axis::data) axes.push_back(Axis::shard);
  // Places are numbered among the ranks of the mesh, in the order in which these were given.
  const auto& ranks = group(Axis::world).world_ranks();
  std::vector<int> members;
  for (const int place : ranks_along(shape(), axes, group(Axis::world).rank()))
    members.push_back(ranks[static_cast<std::size_t>(place)]);
  const Group made = state_->communicators->group({.axis = axis,
                                                   .name = fmt::format("{} x context", name_of(axis)),
                                                   .members = std::move(members),
                                                   .part = state_->part});
  const auto& link = along.state().link;
  return link ? made.over(link) : made;
}

Group Mesh::pipeline_subgroup(const std::vector<int>& places, const std::string& name) const {
  const Group& pipeline = group(Axis::pipeline);
  std::vector<int> members;
  for (const int place : places) {
    require(place >= 0 && place < pipeline.size(), "{}: place {} of a pipeline of {} ranks", name, place, pipeline.size());
    members.push_back(pipeline.world_ranks()[static_cast<std::size_t>(place)]);
  }
  const Group made = state_->communicators->group(
      {.axis = Axis::pipeline, .name = name, .members = std::move(members), .part = state_->part});
  const auto& link = pipeline.state().link;
  return link ? made.over(link) : made;
}

std::vector<int> ranks_along(const MeshShape& shape, Axis axis, int rank) {
  if (axis == Axis::data) return ranks_along(shape, std::vector{Axis::replicate, Axis::shard}, rank);
  if (axis != Axis::world) return ranks_along(shape, std::vector{axis}, rank);
  return ranks_along(shape, std::vector{Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor}, rank);
}

std::vector<int> ranks_along(const MeshShape& shape, const std::vector<Axis>& along, int rank) {
  // The coordinates of `rank`, slowest axis first, and the step between neighbours along each axis.
  constexpr std::array axes{Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor};
  const auto belongs = [&along](Axis axis) { return std::find(along.begin(), along.end(), axis) != along.end(); };
  std::vector<int> members{0};
  int step = 1, base = 0;
  for (auto at = axes.rbegin(); at != axes.rend(); ++at) {
    const int length = shape.along(*at);
    if (belongs(*at)) {
      std::vector<int> longer;
      for (int i = 0; i < length; ++i)
        for (const int member : members) longer.push_back(member + i * step);
      members = std::move(longer);
    } else {
      base += rank / step % length * step;
    }
    step *= length;
  }
  for (int& member : members) member += base;
  return members;
}

}  // namespace bonfire
