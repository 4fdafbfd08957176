#include "bonfire/server/worker.h"

#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/nn/unit.h"
#include "bonfire/server/push_pull.h"
#include "bonfire/shard/wrap.h"

namespace bonfire {
namespace {

// To its engine a worker is a rank alone, on the device of the module, wherever the World is.
DataGroups alone_with(torch::nn::Module& module, const Wrapping& wrapping) {
  const auto groups = groups_of(module, wrapping);
  const auto device = groups.empty() ? c10::Device(c10::kCPU) : groups.front().members.front().parameter.device();
  const auto world = World::from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.device = device});
  return world.mesh({});
}

// What a Worker cannot be asked for is said before it connects.
std::shared_ptr<PushPull> connect(const World& world, const ServerOptions& options, const ShardOptions& shard) {
  require_servers(options, world.size());
  require(!is_server(world, options), "rank {} of {} is a server, not a worker: servers are the first {}", world.rank(),
          world.size(), options.servers);
  if (shard.hook || shard.reduction.compression != plan::Compression::none)
    fail_config("a communication hook beside a parameter server: say ServerOptions::compression; allowed: none");
  if (shard.what != Sharded::none)
    fail_config("{} sharded beside a parameter server: a worker has whole weights and nothing else; allowed: none",
                plan::name_of(shard.what));
  if (shard.offload != Offload::none || shard.versions != 1 || shard.uneven_inputs)
    fail_config("offload, versions or uneven inputs beside a parameter server; allowed: none of them");
  return std::make_shared<PushPull>(world, options);
}

ShardOptions served(ShardOptions shard, const ServerOptions& options, std::shared_ptr<Reduction> hook) {
  shard.hook = std::move(hook);
  // A region has a share for each server, and Units travel one by one.
  shard.buckets.parts = options.servers;
  shard.buckets.one_per_group = true;
  return shard;
}

}  // namespace

struct Worker::State {
  // A Unit's forward begins when its weights are there.
  class AwaitWeights final : public UnitHook {
   public:
    explicit AwaitWeights(PushPull& pull) : pull_(pull) {}
    ~AwaitWeights() override {
      for (const auto& hooks : hooked_) hooks->remove(*this);
    }
    void before_forward(UnitSeam& unit, std::vector<at::Tensor>&) override { pull_.await(units_.at(&unit)); }
    void put_on(UnitSeam& unit, std::size_t number) {
      units_[&unit] = number;
      unit.hooks().add(*this);
      hooked_.push_back(unit.shared_hooks());
    }

   private:
    PushPull& pull_;
    std::map<const UnitSeam*, std::size_t> units_;
    std::vector<std::shared_ptr<UnitHooks>> hooked_;
  };

  State(const World& world, torch::nn::Module& module, const ServerOptions& options, ShardOptions shard)
      : wrapping(shard.wrapping),
        pull(connect(world, options, shard)),
        engine(alone_with(module, wrapping), module, served(std::move(shard), options, pull)),
        steps_before(pull->begin(engine)),
        hook(*pull) {
    const auto keys = pull->units();
    std::map<std::string, UnitSeam*> seams;
    for (const auto& group : groups_of(module, wrapping))
      for (const auto& member : group.members) seams[member.name] = group.unit;
    for (std::size_t unit = 0; unit < keys.size(); ++unit) {
      if (auto* const seam = seams.at(keys[unit]); seam && options.pulled == Pulled::weights)
        hook.put_on(*seam, unit);
      else
        unhooked.push_back(unit);
    }
  }

  void require_to_do() const {
    require(!pull->has_left(), "a step of a worker that had left when it was lost: nobody waits for it (Worker::has_left)");
  }

  Wrapping wrapping;
  std::shared_ptr<PushPull> pull;
  Engine engine;
  std::int64_t steps_before;
  AwaitWeights hook;
  std::vector<std::size_t> unhooked;  // Units whose forward nothing announces
  bool left = false;
};

Worker::Worker(const World& world, torch::nn::Module& module, const ServerOptions& options, ShardOptions shard)
    : state_(std::make_unique<State>(world, module, options, std::move(shard))) {}

Worker::~Worker() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    finish();
  } catch (const std::exception&) {
    // The servers are gone.
  }
}

void Worker::accumulate(const at::Tensor& loss, const BackwardOptions& how) {
  state_->require_to_do();
  // Backward writes where the weights come in.
  state_->pull->await_all();
  state_->engine.accumulate(loss, how);
}

void Worker::backward(const at::Tensor& loss, const BackwardOptions& how) {
  state_->require_to_do();
  state_->pull->await_all();
  try {
    state_->engine.backward(loss, how);
  } catch (...) {
    try {
      state_->pull->abandon();
    } catch (const std::exception&) {
      // The first error says more.
    }
    throw;
  }
}

void Worker::step(double number) {
  auto& pull = *state_->pull;
  auto& engine = state_->engine;
  require(pull.options().pulled == Pulled::weights,
          "Worker::step where gradients are pulled: an optimizer over Worker::engine() takes the step");
  engine.require_gradients();
  pull.end_push(engine, number);
  engine.spend_gradients();
  // New weights come in where they were.
  for (const auto& flat : engine.flats())
    for (const auto& parameter : flat->parameters()) parameter.mutable_grad().reset();
  pull.begin_pull();
  for (const auto unit : state_->unhooked) pull.await(unit);
}

ServedStep Worker::report() { return state_->pull->report(); }
void Worker::await() { state_->pull->await_all(); }
void Worker::finish() {
  if (std::exchange(state_->left, true)) return;
  state_->pull->leave();
}
Engine& Worker::engine() { return state_->engine; }
std::int64_t Worker::steps_before() const { return state_->steps_before; }
bool Worker::is_back() const { return state_->pull->is_back(); }
bool Worker::has_left() const { return state_->pull->has_left(); }
Recorder& Worker::recorder(int server) const {
  return state_->pull->peers().at(static_cast<std::size_t>(server))->world().recorder();
}

}  // namespace bonfire
