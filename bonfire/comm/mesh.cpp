#include "bonfire/comm/mesh.h"

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

Group Mesh::shard_subgroup(int ranks) const {
  const Group& shard = group(Axis::shard);
  if (ranks < 1 || shard.size() % ranks != 0) {
    std::vector<int> allowed;
    for (int divisor = 1; divisor <= shard.size(); ++divisor)
      if (shard.size() % divisor == 0) allowed.push_back(divisor);
    fail_config("groups of {} ranks along the shard axis of {}: allowed are its divisors {}", ranks, shard.size(),
                fmt::join(allowed, ", "));
  }
  const auto first = shard.world_ranks().begin() + shard.rank() / ranks * ranks;
  const Group made = state_->communicators->group(
      {.axis = Axis::shard, .name = fmt::format("shard groups of {}", ranks), .members = {first, first + ranks}});
  const auto& link = shard.state().link;
  return link ? made.over(link) : made;
}

Group Mesh::pipeline_subgroup(const std::vector<int>& places, const std::string& name) const {
  const Group& pipeline = group(Axis::pipeline);
  std::vector<int> members;
  for (const int place : places) {
    require(place >= 0 && place < pipeline.size(), "{}: place {} of a pipeline of {} ranks", name, place, pipeline.size());
    members.push_back(pipeline.world_ranks()[static_cast<std::size_t>(place)]);
  }
  const Group made = state_->communicators->group({.axis = Axis::pipeline, .name = name, .members = std::move(members)});
  const auto& link = pipeline.state().link;
  return link ? made.over(link) : made;
}

bool Mesh::all_failed_alike(const std::string& words, std::int64_t place, std::chrono::milliseconds patience) const {
  return state_->communicators->alarm().raise(words, place, patience);
}

std::vector<int> ranks_along(const MeshShape& shape, Axis axis, int rank) {
  // The coordinates of `rank`, slowest axis first, and the step between neighbours along each axis.
  constexpr std::array axes{Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor};
  const auto belongs = [axis](Axis other) {
    return axis == Axis::world || axis == other ||
           (axis == Axis::data && (other == Axis::replicate || other == Axis::shard));
  };
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
