// The third law: bytes of model state are those of the formula, and from the second step on a step's peak stays what it is.
#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/models/model.h"
#include "bonfire/nn/sequential.h"
#include "tests/shard/twins.h"
#include "tests/support/rank_memory.h"
#include "tests/support/small_net.h"
#include "tests/support/tiny_training.h"

namespace bonfire::memory_test {
namespace {

using testing::Block;
using testing::divisions;
using testing::numbers;
using testing::run_ranks;
using testing::Sharding;
using testing::tiny_models;

struct State {
  std::int64_t parameters = 0, masters = 0, gradients = 0, optimizer = 0;
  bool operator==(const State&) const = default;
};

State measured(Engine& engine, const Optimizer& optimizer) {
  State state;
  for (const auto& flat : engine.flats()) {
    for (std::size_t at = 0; at < flat->layout().regions.size(); ++at)
      state.parameters += static_cast<std::int64_t>(flat->held(at).nbytes());
    for (const auto& share : flat->trained()) {
      if (share.low_precision().defined()) state.masters += static_cast<std::int64_t>(share.master.nbytes());
      state.gradients += static_cast<std::int64_t>(flat->keeps_whole_gradients() ? flat->gradient(share.region).nbytes()
                                                                                 : share.gradient.nbytes());
    }
  }
  state.optimizer = optimizer.state_bytes();
  return state;
}

// From the description of the model and the two settings alone.
State expected(const plan::ModelSpec& spec, const plan::DataParallel& layout, std::int64_t element) {
  const bool p = layout.what == Sharded::parameters, g = p || layout.what == Sharded::gradients;
  const bool o = g || layout.what == Sharded::optimizer;
  State state;
  for (const auto& flat : plan::flats_of(plan::describe(spec), layout)) {
    std::int64_t elements = 0;
    for (const auto& region : flat.regions) elements += region.elements;
    state.parameters += elements * element / (p ? layout.shard : 1);
    if (element != 4) state.masters += elements * 4 / (o ? layout.shard : 1);
    state.gradients += elements * 4 / (g ? layout.shard : 1);
    state.optimizer += elements * 8 / (o ? layout.shard : 1);
  }
  return state;
}

TEST(Memory, OfModelStateIsTheFormula) {
  run_ranks(4, [](World& world) {
    for (const auto& [name, spec] : tiny_models())
      for (const auto& division : divisions())
        for (const bool rounded : {false, true}) {
          auto model = build_model(spec, {.seed = 5, .dtype = at::kFloat});
          const plan::DataParallel layout{.replicate = 4 / division.shard,
                                          .shard = division.shard,
                                          .what = division.what,
                                          .compute = rounded ? plan::Dtype::bf16 : plan::Dtype::fp32};
          ShardOptions options{.what = division.what, .log = Log::silent()};
          if (rounded) options.precision.parameters = at::kBFloat16;
          Engine engine = shard(world.mesh({.replicate = layout.replicate, .shard = layout.shard}), *model, options);
          AdamW optimizer(engine, {});
          auto [input, target] = testing::tiny_data(spec, 0, 0, 1);
          if (input.is_floating_point()) input = input.to(rounded ? at::kBFloat16 : at::kFloat);
          engine.backward(model->loss(input, target));
          optimizer.step();
          const auto got = measured(engine, optimizer), wanted = expected(spec, layout, rounded ? 2 : 4);
          EXPECT_TRUE(got == wanted) << fmt::format(
              "{}, F = {}, {}: parameters {} of {}, masters {} of {}, gradients {} of {}, optimizer {} of {}", name,
              division.shard, plan::name_of(division.what), got.parameters, wanted.parameters, got.masters, wanted.masters,
              got.gradients, wanted.gradients, got.optimizer, wanted.optimizer);
        }
  });
}

// Equal Units and nothing else; 768 elements each, with padding.
constexpr std::int64_t units = 7, wide = 20, unit_bytes = 768 * 8;

UnitSequential equal_units() {
  UnitSequential net;
  for (std::int64_t at = 0; at < units; ++at) net->push_back(Block(wide));
  testing::initialise(*net);
  return net;
}

TEST(Memory, OfThePoolIsTheUnitsAheadAndTheOneThatRuns) {
  run_ranks(4, [](World& world) {
    for (const int factor : {2, 4})
      for (const int prefetch : {0, 1, 2, 4})
        for (const bool free : {true, false}) {
          const int microbatches = 1 + prefetch % 2;
          auto net = equal_units();
          const Mesh mesh = world.mesh({.replicate = 4 / factor, .shard = factor});
          Engine engine =
              shard(mesh, net, {.what = Sharded::parameters, .reshard_after_forward = free, .prefetch = prefetch});
          ASSERT_EQ(engine.flats().front()->layout().bytes, unit_bytes);
          Sgd optimizer(engine, {.lr = 0.01});
          const auto gathered = free ? std::min<std::int64_t>(prefetch + 1, units) : units;
          const auto gradients = std::max(2, prefetch + 1);
          for (int step = 0; step < 4; ++step) {
            for (int micro = 1; micro < microbatches; ++micro)
              engine.accumulate(net->forward(numbers({3, wide}, 1)).pow(2).mean());
            engine.backward(net->forward(numbers({3, wide}, 2)).pow(2).mean());
            optimizer.step();
            if (step == 0) continue;
            EXPECT_EQ(engine.pool_bytes(), (gathered + gradients) * unit_bytes)
                << factor << ", prefetch " << prefetch << (free ? ", free" : ", keep") << ", step " << step;
          }
        }
  });
}

// The second step gathers ahead, and makes the last of the pool's buffers.
TEST(Memory, NothingNewIsAllocatedFromTheThirdStepOn) {
  run_ranks(4, [](World& world) {
    for (const Sharding& sharding : testing::shardings()) {
      auto net = equal_units();
      Engine engine =
          shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net, sharding.options());
      AdamW optimizer(engine, {.lr = 0.01});
      testing::RankMemory memory;
      std::vector<std::int64_t> steps;
      for (int step = 0; step < 6; ++step) {
        const auto x = numbers({3, wide}, static_cast<std::uint64_t>(step));
        memory.allocated();
        engine.backward(net->forward(x).pow(2).mean());
        optimizer.step({.clip = 1});
        steps.push_back(memory.allocated());
      }
      EXPECT_EQ(std::count(steps.begin() + 2, steps.end(), steps.back()), 4)
          << sharding.name() << ": " << fmt::format("{}", fmt::join(steps, " "));
    }
  });
}

// Peaks of steps 1 to 6, as the allocator sees them.
template <class Step>
void expect_equal_peaks(const std::string& what, const Step& step) {
  testing::RankMemory memory;
  std::vector<std::int64_t> peaks;
  for (int at = 0; at < 6; ++at) {
    memory.peak();  // what was before is not asked
    step();
    peaks.push_back(memory.peak());
  }
  EXPECT_EQ(std::count(peaks.begin() + 1, peaks.end(), peaks.back()), 5)
      << what << ": " << fmt::format("{}", fmt::join(peaks, " "));
}

TEST(Memory, APeakIsTheSameFromTheSecondStepOn) {
  run_ranks(4, [](World& world) {
    for (const Sharding& sharding : testing::shardings())
      for (const bool rounded : {false, true}) {
        const int microbatches = rounded ? 3 : 1;
        auto net = equal_units();
        ShardOptions options{.accumulation = rounded ? Accumulation::full : Accumulation::sharded};
        if (rounded) options.precision.parameters = at::kBFloat16;
        Engine engine =
            shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net, sharding.options(options));
        AdamW optimizer(engine, {.lr = 0.01});
        const auto x = numbers({64, wide}, 1, rounded ? at::kBFloat16 : at::kDouble);
        expect_equal_peaks(fmt::format("{}, {} microbatches", sharding.name(), microbatches), [&] {
          for (int micro = 1; micro < microbatches; ++micro) engine.accumulate(net->forward(x).pow(2).mean());
          engine.backward(net->forward(x).pow(2).mean());
          optimizer.step({.clip = 1});
        });
      }
  });
}

}  // namespace
}  // namespace bonfire::memory_test
