#include "bonfire/comm/world.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/backend.h"
#include "bonfire/comm/communicators.h"
#include "bonfire/comm/gloo_backend.h"
#include "bonfire/comm/mesh_state.h"
#include "bonfire/comm/returned_world.h"

namespace bonfire {
namespace {

void require_ranks(const std::string& what, const std::vector<int>& ranks, int me, int size) {
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool once = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  const bool known = !sorted.empty() && sorted.front() >= 0 && sorted.back() < size;
  if (!once || !known || !std::binary_search(sorted.begin(), sorted.end(), me))
    fail_config("{} of ranks {} on rank {} of {}: allowed are ranks of the world, each once, this one among them", what,
                fmt::join(ranks, ", "), me, size);
}

// In place of the communicator of all ranks, where those have made theirs without this one.
class NoCommunicator final : public Backend {
 public:
  explicit NoCommunicator(int rank) : rank_(rank) {}

  Work all_reduce(at::Tensor, Reduce) override { refuse(); }
  Work all_gather(std::span<const Transfer>) override { refuse(); }
  Work reduce_scatter(std::span<const Transfer>, Reduce) override { refuse(); }
  Work broadcast(at::Tensor, int) override { refuse(); }
  Work reduce(at::Tensor, int, Reduce) override { refuse(); }
  Work scatter(at::Tensor, at::Tensor, int) override { refuse(); }
  Work gather(at::Tensor, at::Tensor, int) override { refuse(); }
  Work all_to_all(at::Tensor, at::Tensor) override { refuse(); }
  Work batch(std::span<const Message>) override { refuse(); }
  Work barrier() override { refuse(); }
  Work over(EmulatedLink&, double, Work) override { refuse(); }
  bool ordered() const override { return false; }
  std::string stream() const override { return "none"; }
  void shutdown() override {}

 private:
  [[noreturn]] void refuse() const {
    fail("rank {} was lost and is back: it has no part in collectives of all ranks, whose connections are older", rank_);
  }

  int rank_;
};

}  // namespace

struct World::State {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Communicators> communicators;
  Group group;
  std::vector<std::shared_ptr<void>> companions;  // last, so that they end first

  // `all_ranks`: the communicator of everybody, where there is one already.
  static std::shared_ptr<State> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options,
                                     std::shared_ptr<Backend> all_ranks) {
    require(size >= 1 && rank >= 0 && rank < size, "rank {} of {}: ranks are numbered 0..size-1", rank, size);
    auto state = std::make_shared<State>();
    state->rank = rank;
    state->size = size;
    state->communicators = std::make_shared<Communicators>(std::move(store), rank, size, std::move(options));
    std::vector<int> everybody(static_cast<std::size_t>(size));
    std::iota(everybody.begin(), everybody.end(), 0);
    if (all_ranks) state->communicators->adopt(everybody, std::move(all_ranks));
    state->group = state->communicators->group({.axis = Axis::world, .members = everybody});
    return state;
  }

  const WorldOptions& options() const { return communicators->options(); }
};

World::World() : World(from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1)) {}

World returned_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options) {
  return World(World::State::make(std::move(store), rank, size, std::move(options), std::make_shared<NoCommunicator>(rank)));
}

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
int World::local_rank() const { return state_->options().local_rank; }
int World::local_size() const { return state_->options().local_size; }
int World::node() const { return state_->options().node; }
c10::Device World::device() const { return state_->options().device; }
const Log& World::log() const { return state_->options().log; }
const Group& World::group() const { return state_->group; }
const std::shared_ptr<ProgressBoard>& World::progress() const { return state_->communicators->progress(); }
void World::keep(std::shared_ptr<void> companion) const { state_->companions.push_back(std::move(companion)); }
Recorder& World::recorder() const { return *state_->communicators->recorder(); }
c10d::Store& World::store() const { return state_->communicators->store(); }

Mesh World::mesh(const MeshShape& shape) const {
  std::vector<int> everybody(static_cast<std::size_t>(size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  return mesh(shape, everybody);
}

Mesh World::mesh(const MeshShape& shape, const std::vector<int>& ranks) const {
  for (const Axis axis : {Axis::pipeline, Axis::replicate, Axis::shard, Axis::context, Axis::tensor})
    if (shape.along(axis) < 1) fail_config("mesh axis {} is {}, must be at least 1", name_of(axis), shape.along(axis));
  const bool everybody = static_cast<int>(ranks.size()) == size();
  if (shape.size() != static_cast<int>(ranks.size()))
    fail_config("mesh {} x {} x {} x {} x {} (pipeline, replicate, shard, context, tensor) has {} ranks, but {} has {}",
                shape.pipeline, shape.replicate, shape.shard, shape.context, shape.tensor, shape.size(),
                everybody ? "the world" : "its list", ranks.size());
  require_ranks("a mesh", ranks, rank(), size());
  auto state = std::make_shared<Mesh::State>();
  state->shape = shape;
  state->communicators = state_->communicators;
  if (!everybody) state->part = ranks;
  const auto place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  const auto make = [&](Axis axis, const std::string& name) {
    std::vector<int> members;
    for (const int at : ranks_along(shape, axis, place)) members.push_back(ranks[static_cast<std::size_t>(at)]);
    return state_->communicators->group({.axis = axis, .name = name, .members = std::move(members), .part = state->part});
  };
  for (std::size_t at = 0; at < axis_count; ++at) state->groups[at] = make(static_cast<Axis>(at), "");
  state->gathers = make(Axis::shard, "shard gathers");
  return Mesh(std::move(state));
}

Group World::group(const std::string& name, const std::vector<int>& ranks, Axis axis) const {
  require_ranks(fmt::format("group '{}'", name), ranks, rank(), size());
  return state_->communicators->group({.axis = axis, .name = name, .members = ranks, .part = ranks});
}

}  // namespace bonfire
