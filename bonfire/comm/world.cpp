#include "bonfire/comm/world.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/gloo_backend.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/comm/mesh_state.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/recorder.h"

namespace bonfire {

struct World::State {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  WorldOptions options;
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  std::shared_ptr<ProgressBoard> progress = std::make_shared<ProgressBoard>();
  Group group;
  std::map<std::vector<int>, std::shared_ptr<Backend>> communicators;  // by members: axes with equal members share one
  // One group for each axis and its members, however many meshes ask for it: its collectives are counted and compared once.
  std::map<std::pair<Axis, std::vector<int>>, Group> groups;
  std::vector<std::shared_ptr<void>> companions;  // last, so that they end first

  // `communicator`: of all ranks, where there is one already.
  static std::shared_ptr<State> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options,
                                     std::shared_ptr<Backend> communicator) {
    require(size >= 1 && rank >= 0 && rank < size, "rank {} of {}: ranks are numbered 0..size-1", rank, size);
    auto state = std::make_shared<State>();
    state->store = std::move(store);
    state->rank = rank;
    state->size = size;
    state->options = std::move(options);
    std::vector<int> everybody(static_cast<std::size_t>(size));
    std::iota(everybody.begin(), everybody.end(), 0);
    if (communicator) state->communicators[everybody] = std::move(communicator);
    state->group = state->make_group(Axis::world, everybody);
    return state;
  }

  std::shared_ptr<Backend> connect(c10::intrusive_ptr<c10d::Store> meeting, const Group::State& group) const {
    if (options.device.is_cuda())
      return require_cuda_plugin().make_nccl(std::move(meeting), group.rank, group.size(),
                                             {.name = group.name, .device = options.device, .timeout = options.timeout});
    return make_gloo_backend(
        std::move(meeting),
        {.rank = group.rank, .size = group.size(), .timeout = options.timeout, .address = options.address});
  }

  // Collective among `members`: a group over them, connected on first use.
  Group make_group(Axis axis, const std::vector<int>& members) {
    if (const auto known = groups.find({axis, members}); known != groups.end()) return known->second;
    auto state = std::make_shared<Group::State>();
    state->axis = axis;
    state->name = name_of(axis);
    state->world_ranks = members;
    state->device = options.device;
    state->rank = static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
    if (members.size() > 1) {
      const std::string meeting = fmt::format("group {}", fmt::join(members, ","));
      auto& backend = communicators[members];
      if (!backend) backend = connect(c10::make_intrusive<c10d::PrefixStore>(meeting, store), *state);
      state->backend = backend;
      state->recorder = recorder;
      state->progress = progress;
      state->lane = &progress->lane(state->name, members);
      if (options.debug)
        state->fingerprints = std::make_shared<FingerprintBoard>(
            store, fmt::format("{} {}", state->name, fmt::join(members, ",")), members, state->rank, options.timeout);
    }
    return groups.emplace(std::pair{axis, members}, Group(std::move(state))).first->second;
  }
};

World::World() : World(from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1)) {}

World World::from_store(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options) {
  return World(State::make(std::move(store), rank, size, std::move(options), nullptr));
}

World World::from_process_group(c10::intrusive_ptr<c10d::Backend> process_group, c10::intrusive_ptr<c10d::Store> store,
                                WorldOptions options) {
  if (options.device.is_cuda())
    fail_config("a World from a process group is for the CPU and Gloo; for device {} make it from the store",
                options.device.str());
  const int rank = process_group->getRank(), size = process_group->getSize();
  return World(State::make(std::move(store), rank, size, std::move(options), adopt_gloo_backend(std::move(process_group))));
}

int World::rank() const { return state_->rank; }
int World::size() const { return state_->size; }
int World::local_rank() const { return state_->options.local_rank; }
int World::local_size() const { return state_->options.local_size; }
int World::node() const { return state_->options.node; }
c10::Device World::device() const { return state_->options.device; }
const Log& World::log() const { return state_->options.log; }
const Group& World::group() const { return state_->group; }
const std::shared_ptr<ProgressBoard>& World::progress() const { return state_->progress; }
void World::keep(std::shared_ptr<void> companion) const { state_->companions.push_back(std::move(companion)); }
Recorder& World::recorder() const { return *state_->recorder; }
c10d::Store& World::store() const { return *state_->store; }

Mesh World::mesh(const MeshShape& shape) const {
  for (const Axis axis : {Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor})
    if (shape.along(axis) < 1) fail_config("mesh axis {} is {}, must be at least 1", name_of(axis), shape.along(axis));
  if (shape.size() != size())
    fail_config(
        "mesh {} x {} x {} x {} x {} (pipeline, replicate, shard, context, tensor) has {} ranks, but the world has {}",
        shape.pipeline, shape.replicate, shape.shard, shape.context, shape.tensor, shape.size(), size());
  auto state = std::make_shared<Mesh::State>();
  state->shape = shape;
  for (std::size_t at = 0; at < axis_count; ++at) {
    const auto axis = static_cast<Axis>(at);
    state->groups[at] = state_->make_group(axis, ranks_along(shape, axis, rank()));
  }
  return Mesh(std::move(state));
}

}  // namespace bonfire
