// Stages whose Units are gathered one by one: gathers run while Units compute, over a link that takes its time.
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"

namespace bonfire::gather_overlap_test {
namespace {

constexpr std::int64_t width = 8;
constexpr int units = 8, microbatches = 4;

// The Units' computations of one rank, each of which takes until every gather that was issued before it has ended. One that
// is issued only after a computation would never end in it.
class Computations {
 public:
  explicit Computations(Recorder& recorder) : recorder_(recorder) {}

  struct One {
    int unit = 0;
    std::size_t issued = 0;  // gathers that were issued before it began
    std::ptrdiff_t in = 0;   // Units that had memory then
  };
  void watch(const Engine& engine) { engine_ = &engine; }
  const std::vector<One>& all() const { return all_; }
  std::vector<Record> gathers() const {
    auto records = recorder_.records();
    std::erase_if(records, [](const Record& record) { return record.what.kind != CollectiveKind::all_gather; });
    return records;
  }

  void run(int unit) {
    if (!recorder_.recording()) return;
    const auto& flats = engine_->flats();
    all_.push_back({unit, gathers().size(),
                    std::count_if(flats.begin(), flats.end(), [](const auto& flat) { return flat->present(); })});
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (under_way() > 0) {
      require(std::chrono::steady_clock::now() < give_up, "{} gathers do not end while Unit {} runs", under_way(), unit);
      std::this_thread::yield();
    }
  }

 private:
  std::ptrdiff_t under_way() const {
    const auto gathers = this->gathers();
    return std::count_if(gathers.begin(), gathers.end(),
                         [](const Record& record) { return record.end == 0 || record.end > now_ns(); });
  }

  Recorder& recorder_;
  const Engine* engine_ = nullptr;  // of the stage
  std::vector<One> all_;
};

struct LayerImpl : torch::nn::Module {
  LayerImpl(int number, std::shared_ptr<Computations> computations)
      : number(number),
        computations(std::move(computations)),
        weight(register_parameter("weight", testing::numbers({width, width}, number))) {}
  at::Tensor forward(const at::Tensor& x) {
    computations->run(number);
    const auto y = x.matmul(weight).tanh();
    if (y.requires_grad()) y.register_hook([all = computations, unit = number](const at::Tensor&) { all->run(unit); });
    return y;
  }
  int number;
  std::shared_ptr<Computations> computations;
  at::Tensor weight;
};
BONFIRE_UNIT(Layer);

Chain layers(const std::shared_ptr<Computations>& computations) {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back(fmt::format("layer{}", unit));
  chain.build = [computations](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<Layer> parts;
    for (int unit = range.begin; unit < range.end; ++unit)
      parts.push_back(root->register_module(fmt::format("layer{}", unit), Layer(unit, computations)));
    return StageModule{root, [parts, last = range.end == units](Tensors values, const Microbatch& batch) mutable {
                         for (auto& part : parts) values[0] = part->forward(values[0]);
                         return Tensors{last ? (values[0] - batch.target[0]).pow(2).mean() : values[0]};
                       }};
  };
  return chain;
}

// The computations of a step, and how many gathers it had.
struct Step {
  std::vector<Computations::One> computations;
  std::size_t gathers = 0;
};
Step fourth_step(World& world, int prefetch) {
  auto computations = std::make_shared<Computations>(world.recorder());
  const Mesh mesh =
      world.mesh({.pipeline = 2, .shard = 2}).over(Axis::shard, {.latency_seconds = 0.002, .bytes_per_second = 1e6});
  PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = microbatches})};
  options.shard = {.what = Sharded::parameters, .reshard_after_forward = true, .prefetch = prefetch};
  Pipeline pipeline(mesh, layers(computations), options);
  computations->watch(pipeline.engine(pipeline.local_stages().front()));
  Sgd optimizer(pipeline, {.lr = 0.01});
  for (int number = 0; number < 4; ++number) {
    std::vector<Microbatch> batch;
    for (int at = 0; at < microbatches; ++at)
      batch.push_back({.input = {testing::numbers({2, width}, number + at)}, .target = {testing::numbers({2, width}, at)}});
    if (number == 3) world.recorder().start();
    pipeline.step(batch);
    world.recorder().stop();
    optimizer.step();
  }
  Step step{computations->all(), computations->gathers().size()};
  world.recorder().clear();
  return step;
}

// Calls `check(computation, gathers that it and those before it needed)`.
template <class Check>
void for_each_computation(const Step& step, const Check& check) {
  ASSERT_EQ(step.computations.size(), static_cast<std::size_t>(2 * microbatches * units / 2));
  std::size_t needed = 0;
  for (std::size_t at = 0; at < step.computations.size(); ++at) {
    // A Unit that runs twice in a row stays.
    if (at == 0 || step.computations[at].unit != step.computations[at - 1].unit) ++needed;
    check(step.computations[at], needed);
  }
  EXPECT_EQ(needed, step.gathers);
}

// When a Unit begins to compute, the next one's gather is under way, through all microbatches and in both directions; it
// ends while the Unit computes, and only the first gather of a step is waited for.
TEST(GatherOverlap, GathersEndWhileTheUnitBeforeComputes) {
  testing::run_ranks(4, [](World& world) {
    const auto step = fourth_step(world, /*prefetch=*/1);
    for_each_computation(step, [&](const Computations::One& one, std::size_t needed) {
      EXPECT_EQ(one.issued, std::min(needed + 1, step.gathers)) << "Unit " << one.unit << ", rank " << world.rank();
      EXPECT_LE(one.in, 2) << "Unit " << one.unit << ", rank " << world.rank();
    });
  });
}

TEST(GatherOverlap, WithoutPrefetchNothingOverlaps) {
  testing::run_ranks(4, [](World& world) {
    for_each_computation(fourth_step(world, /*prefetch=*/0), [&](const Computations::One& one, std::size_t needed) {
      EXPECT_EQ(one.issued, needed) << "Unit " << one.unit << ", rank " << world.rank();
      EXPECT_EQ(one.in, 1) << "Unit " << one.unit << ", rank " << world.rank();
    });
  });
}

}  // namespace
}  // namespace bonfire::gather_overlap_test
