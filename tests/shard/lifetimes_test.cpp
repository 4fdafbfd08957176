// Modules, engines and optimizers may go, or move, in any order.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/nn/modules/container/sequential.h>

#include "bonfire/base/error.h"
#include "tests/shard/twins.h"
#include "tests/support/thrown.h"

namespace bonfire::lifetimes_test {
namespace {

using testing::Block;
using testing::BlockImpl;
using testing::Chain;
using testing::chain_input;
using testing::expect_part;
using testing::initialise;
using testing::numbers;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;
using testing::thrown;
using testing::Twins;

at::Tensor loss_at(Chain& net, int rank, int step = 0) {
  return net->forward(chain_input(rank, step), {0, 1, 2}).pow(2).mean();
}

Mesh mesh_of(const World& world, const Sharding& sharding) {
  return world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor});
}

// Memory of modules that are gone is kept, and shows whether somebody writes to it.
struct Graveyard {
  static constexpr unsigned char mark = 0x5a;
  struct Grave {
    unsigned char* memory;
    std::size_t bytes;
    bool untouched() const {
      return std::all_of(memory, memory + bytes, [](unsigned char byte) { return byte == mark; });
    }
  };
  static std::vector<Grave>& graves() {
    thread_local std::vector<Grave> all;
    return all;
  }
};

struct WatchedImpl : BlockImpl {
  using BlockImpl::BlockImpl;
  at::Tensor forward(const at::Tensor& x) { return BlockImpl::forward(x); }
  static void* operator new(std::size_t bytes) { return std::malloc(bytes); }
  static void operator delete(void* memory, std::size_t bytes) {
    std::fill_n(static_cast<unsigned char*>(memory), bytes, Graveyard::mark);
    Graveyard::graves().push_back({static_cast<unsigned char*>(memory), bytes});
  }
};

TEST(Lifetimes, AModuleMayGoBeforeItsEngine) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      std::optional<Engine> engine;
      {
        std::shared_ptr<Unit<WatchedImpl>> net(new Unit<WatchedImpl>(6));
        initialise(*net);
        engine.emplace(shard(mesh_of(world, sharding), *net, sharding.options()));
        engine->backward(net->forward(chain_input(world.rank(), 0)).pow(2).mean());
      }
      ASSERT_EQ(Graveyard::graves().size(), 1u);
      Sgd optimizer(*engine, {.lr = 0.1});
      optimizer.step();
      engine.reset();
      EXPECT_TRUE(Graveyard::graves().front().untouched()) << sharding.name();
      std::free(Graveyard::graves().front().memory);
      Graveyard::graves().clear();
    }
  });
}

TEST(Lifetimes, AnEngineMayMoveUnderItsOptimizer) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(3); });
      const auto loss = [](int step) { return [step](Chain& net, int rank) { return loss_at(net, rank, step); }; };
      twins.step(loss(0));
      std::optional<Engine> elsewhere(std::move(twins.engine));
      elsewhere->backward(loss_at(twins.ours, world.rank(), 1));
      twins.add(loss(1));
      twins.update();
      twins.engine = std::move(*elsewhere);
      twins.step(loss(2));
      twins.expect_equal();
    }
  });
}

TEST(Lifetimes, AnOptimizerNoticesThatItsEngineIsGone) {
  run_ranks(1, [](World& world) {
    Chain net(3);
    std::optional<Engine> engine(shard(world.mesh({}), net));
    Sgd optimizer(*engine, {.lr = 0.1});
    engine->backward(loss_at(net, 0));
    engine.reset();
    try {
      optimizer.step();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("the Engine or Pipeline of this optimizer is gone"), std::string::npos)
          << error.what();
    }
  });
}

// Without release(): what it held whole stays, what it had shares of is gone, and whoever asks for that hears why.
TEST(Lifetimes, AnEngineThatIsGoneIsNamed) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      SCOPED_TRACE(sharding.name());
      Chain net(3);
      initialise(*net);
      const double before = net->head->weight.sum().item<double>();
      { const Engine engine = shard(mesh_of(world, sharding), net, sharding.options()); }
      const auto reading = thrown<std::exception>([&] { EXPECT_EQ(net->head->weight.sum().item<double>(), before); });
      const auto again = thrown<std::exception>([&] { shard(world.mesh({.replicate = world.size()}), net); });
      if (sharding.what != Sharded::parameters) {
        EXPECT_EQ(reading, "");
        EXPECT_EQ(again, "");
        continue;
      }
      expect_part(reading, "parameter 'head.");
      expect_part(reading,
                  "has no memory: it was sharded by an Engine that is gone; Engine::release() gives a module its whole "
                  "weights back before");
      expect_part(again,
                  "has no memory: its Unit was built in a build scope with other options than shard() was given, or "
                  "it was sharded by an Engine that is gone");
    }
  });
}

// The module is plain torch's again, with what was learned, and can be sharded once more in another way.
TEST(Lifetimes, AnEngineGivesParametersBackWhole) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const Sharding& next : {Sharding{4, Sharded::parameters}, Sharding{2, Sharded::optimizer}}) {
        Twins<Chain> twins(world, sharding, [] { return Chain(3); });
        const auto loss = [](int step) { return [step](Chain& net, int rank) { return loss_at(net, rank, step); }; };
        for (int step = 0; step < 2; ++step) twins.step(loss(step));
        twins.engine.release();
        EXPECT_LE((loss_at(twins.ours, 0) - loss_at(twins.theirs, 0)).abs().item<double>(), 1e-12) << sharding.name();
        for (const auto& parameter : twins.ours->parameters()) {
          EXPECT_TRUE(parameter.requires_grad());
          EXPECT_EQ(static_cast<std::size_t>(parameter.nbytes()), parameter.storage().nbytes());
        }
        Engine again = shard(mesh_of(world, next), twins.ours, next.options());
        Sgd optimizer(again, {.lr = Twins<Chain>::rate});
        again.backward(loss_at(twins.ours, world.rank(), 5));
        optimizer.step();
        twins.add(loss(5));
        twins.update_theirs();
        const auto whole = again.full_parameters();
        const auto mine = twins.ours->named_parameters();
        for (const auto& item : twins.theirs->named_parameters())
          EXPECT_LE((mine[item.key()] - item.value()).abs().max().item<double>(), 1e-12) << item.key() << sharding.name();
      }
  });
}

// Refuses what is larger than a limit, while there is one.
class ScarceMemory final : public c10::Allocator {
 public:
  explicit ScarceMemory(std::size_t most) : most_(most) { c10::SetCPUAllocator(this, 100); }
  ~ScarceMemory() override { c10::SetCPUAllocator(plain_, 100); }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes > most_) throw std::bad_alloc();
    return plain_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return plain_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { plain_->copy_data(to, from, bytes); }

 private:
  c10::Allocator* plain_ = c10::GetCPUAllocator();
  std::size_t most_;
};

struct UnevenImpl : torch::nn::Module {
  UnevenImpl() : small(register_module("small", Block(6))), large(register_module("large", Block(60))) { initialise(*this); }
  at::Tensor forward(const at::Tensor& x) { return large->forward(small->forward(x).repeat({1, 10})); }
  Block small, large;
};
BONFIRE_UNIT(Uneven);

TEST(Lifetimes, MemoryThatRunsOutHalfwayThroughFullParametersIsGivenBack) {
  constexpr int ranks = 2;
  std::optional<ScarceMemory> scarce;
  run_ranks(ranks, [&](World& world) {
    Twins<Uneven> twins(world, {ranks, Sharded::parameters}, [] { return Uneven(); });
    const auto loss = [](Uneven& net, int rank) { return net->forward(chain_input(rank, 0)).pow(2).mean(); };
    twins.step(loss);
    const auto pool = twins.engine.pool_bytes();
    world.group().barrier().wait();
    if (world.rank() == 0) scarce.emplace(20000);
    world.group().barrier().wait();
    EXPECT_THROW(static_cast<void>(twins.engine.full_parameters()), std::exception);
    for (const auto& flat : twins.engine.flats()) EXPECT_FALSE(flat->present());
    world.group().barrier().wait();
    if (world.rank() == 0) scarce.reset();
    world.group().barrier().wait();
    twins.step(loss);
    EXPECT_EQ(twins.engine.pool_bytes(), pool);
    twins.expect_equal();
  });
}

}  // namespace
}  // namespace bonfire::lifetimes_test
