// The second law: what the recorder saw of a step is what the plan computes from the model's description alone.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/random.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/share.h"
#include "tests/shard/twins.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::communication_test {
namespace {

using plan::DataParallel;
using testing::Block;
using testing::run_ranks;
using testing::tiny_data;
using testing::tiny_models;
using List = std::vector<Collective>;

struct Case {
  plan::ModelSpec spec;
  DataParallel layout;
  bool one_more = false;  // somebody slips in a gather
  bool frozen = false;    // every second parameter
};

plan::ModelDescription describe(const Case& run) {
  auto description = plan::describe(run.spec);
  bool even = true;
  for (auto& unit : description.units)
    for (auto& parameter : unit.parameters)
      if ((even = !even) && run.frozen) parameter.trained = false;
  return description;
}

// Collective: what the second step really moved, on this rank.
List recorded(const World& world, const Case& run) {
  const auto& layout = run.layout;
  auto model = build_model(run.spec, {.seed = 5, .dtype = scalar_type(layout.master)});
  if (run.frozen) {
    const auto description = describe(run);
    for (const auto& unit : description.units)
      for (const auto& parameter : unit.parameters)
        if (!parameter.trained)
          model->named_parameters()[unit.name.empty() ? parameter.name : unit.name + "." + parameter.name].set_requires_grad(
              false);
  }
  const Mesh mesh = world.mesh({.replicate = layout.replicate, .shard = layout.shard});
  ShardOptions options{.what = layout.what,
                       .prefetch = layout.prefetch,
                       .backward_prefetch = layout.backward_prefetch,
                       .accumulation = layout.accumulation,
                       .buckets = layout.buckets,
                       .reduction = {.compression = layout.compression, .powersgd_rank = layout.powersgd_rank},
                       .log = Log::silent()};
  options.precision.parameters = scalar_type(layout.compute);
  options.precision.gradients = scalar_type(layout.gradient);
  if (layout.reduction != layout.gradient) options.precision.reduction = scalar_type(layout.reduction);
  if (layout.keep) options.precision.keep = [&](const std::string& name, const at::Tensor&) { return layout.keep(name); };
  options.reshard_after_forward = layout.reshard_after_forward;
  if (layout.reshard_ranks > 0) options.reshard_after_forward = layout.reshard_ranks;
  Engine engine = shard(mesh, *model, options);
  AdamW optimizer(engine, {.lr = 0.01});
  for (int step = 0; step < 2; ++step) {
    if (step == 1) {
      world.recorder().clear();
      world.recorder().start();
    }
    for (int micro = 0; micro < layout.microbatches; ++micro) {
      auto [input, target] = tiny_data(run.spec, step, micro, 1);
      if (input.is_floating_point()) input = input.to(scalar_type(layout.compute));
      const auto loss = model->loss(input, target);
      micro + 1 < layout.microbatches ? engine.accumulate(loss) : engine.backward(loss);
    }
    if (run.one_more) {
      auto all = at::empty({layout.shard});
      mesh.gathers().all_gather(all, at::zeros({1})).wait();
    }
    mesh.group(Axis::data).sum(1);
    optimizer.step({.clip = layout.clip ? 1.0 : 0.0});
  }
  world.recorder().stop();
  return world.recorder().collectives();
}

List along(const List& list, Axis axis) {
  List part;
  for (const auto& one : list)
    if (one.axis == axis) part.push_back(one);
  return part;
}

std::string words(const List& list) {
  std::string text;
  for (const auto& one : list) text += "\n  " + to_string(one);
  return text;
}

// Reductions over replicas begin when those over shards have been seen to end, so between axes there is no order in a
// hybrid.
bool same(const List& a, const List& b, const DataParallel& layout) {
  if (layout.replicate == 1 || layout.shard == 1) return a == b;
  for (const Axis axis : {Axis::shard, Axis::replicate, Axis::data})
    if (along(a, axis) != along(b, axis)) return false;
  return a.size() == b.size();
}

void compare(const World& world, const Case& run) {
  const auto& layout = run.layout;
  const auto list = recorded(world, run), predicted = plan::collectives_of_step(describe(run), layout);
  EXPECT_TRUE(same(list, predicted, layout)) << fmt::format(
      "{} x {} {}, {} to {}, prefetch {} {}, {} microbatches {}, clip {}{}; predicted:{}\nrecorded:{}", layout.replicate,
      layout.shard, plan::name_of(layout.what), layout.reshard_after_forward ? "free" : "keep", layout.reshard_ranks,
      layout.prefetch, layout.backward_prefetch == plan::BackwardPrefetch::before_reduction ? "before" : "after",
      layout.microbatches, layout.accumulation == Accumulation::full ? "full" : "sharded", layout.clip,
      run.frozen ? ", half frozen" : "", words(predicted), words(list));
}

class Communication : public ::testing::TestWithParam<std::size_t> {
 protected:
  const plan::ModelSpec& spec() const { return tiny_models()[GetParam()].spec; }
  // The models share the cells of the matrix: each is some model's, by lot.
  bool takes(std::uint64_t number) const { return Random(1).below(number, tiny_models().size()) == GetParam(); }
};

TEST_P(Communication, OfShardedParameters) {
  run_ranks(4, [&](World& world) {
    std::uint64_t number = 0;
    for (const int factor : {2, 4})
      for (const int reshard : {-1, 0, 1, 2})
        for (const int prefetch : {0, 1, 2, 4})
          for (const auto accumulation : {Accumulation::sharded, Accumulation::full})
            for (const int microbatches : {1, 3}) {
              // The rest changes along with these.
              const auto variant = ++number + static_cast<std::uint64_t>(prefetch);
              if (!takes(number)) continue;
              compare(world, {.spec = spec(),
                              .layout = {.replicate = 4 / factor,
                                         .shard = factor,
                                         .what = Sharded::parameters,
                                         .accumulation = accumulation,
                                         .microbatches = microbatches,
                                         .reshard_after_forward = reshard >= 0,
                                         .reshard_ranks = std::max(0, reshard),
                                         .prefetch = prefetch,
                                         .backward_prefetch = variant % 2 ? plan::BackwardPrefetch::before_reduction
                                                                          : plan::BackwardPrefetch::after_reduction,
                                         .clip = variant / 2 % 2 == 0},
                              .frozen = variant / 4 % 2 == 0});
            }
  });
}

TEST_P(Communication, OfWholeParameters) {
  run_ranks(4, [&](World& world) {
    std::uint64_t number = 0;
    for (const int factor : {1, 2, 4})
      for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters})
        for (const auto accumulation : {Accumulation::sharded, Accumulation::full})
          for (const int microbatches : {1, 3})
            for (const bool clip : {false, true}) {
              if (factor > 1 && (what == Sharded::none || what == Sharded::parameters)) continue;
              if (!takes(++number)) continue;
              compare(world, {.spec = spec(),
                              .layout = {.replicate = 4 / factor,
                                         .shard = factor,
                                         .what = what,
                                         .accumulation = accumulation,
                                         .microbatches = microbatches,
                                         .buckets = {.bucket_bytes = 3000, .first_bucket_bytes = 1500},
                                         .clip = clip},
                              .frozen = clip});
            }
  });
}

TEST_P(Communication, OfCompressedReplicas) {
  run_ranks(2, [&](World& world) {
    for (const auto compression : {plan::Compression::none, plan::Compression::bf16, plan::Compression::powersgd})
      for (const std::int64_t bytes : {1, 3000, 1 << 20})
        compare(world, {.spec = spec(),
                        .layout = {.replicate = 2,
                                   .buckets = {.bucket_bytes = bytes, .first_bucket_bytes = bytes / 2 + 1},
                                   .compression = compression,
                                   .powersgd_rank = 2}});
  });
}

// ZeRO-1 and ZeRO-2 move what replicas do, with every factor; ZeRO-3 gathers once more in backward, but for the Unit that
// ran last and for what is the root's: with all ranks in one shard group half as much again.
TEST_P(Communication, OfTheStagesOfZero) {
  run_ranks(4, [&](World& world) {
    const plan::BucketOptions one_per_unit{.bucket_bytes = 1, .first_bucket_bytes = 1};
    const auto moved = [&](int factor, Sharded what) {
      const DataParallel layout{.replicate = 4 / factor, .shard = factor, .what = what, .buckets = one_per_unit};
      return plan::bytes_moved(recorded(world, {.spec = spec(), .layout = layout}), layout);
    };
    const double replicas = moved(1, Sharded::none), loss = 8 * 1.5;
    const auto description = plan::describe(spec());
    const bool root = description.units.front().kind == plan::UnitKind::root;
    for (const int factor : {2, 4}) {
      EXPECT_DOUBLE_EQ(moved(factor, Sharded::optimizer), replicas);
      EXPECT_DOUBLE_EQ(moved(factor, Sharded::gradients), replicas);
      // In the order of backward.
      const auto flats =
          plan::flats_of(description, {.replicate = 4 / factor, .shard = factor, .what = Sharded::parameters});
      double again = 0;
      for (std::size_t at = 1; at + (root ? 1 : 0) < flats.size(); ++at) again += static_cast<double>(flats[at].bytes);
      const double seen = moved(factor, Sharded::parameters), share = (factor - 1.0) / factor;
      EXPECT_DOUBLE_EQ(seen, replicas + share * again);
      if (factor == 4 && !root) {
        EXPECT_DOUBLE_EQ(seen - loss, 1.5 * (replicas - loss) - share * static_cast<double>(flats.front().bytes));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(EveryModel, Communication, ::testing::Range(std::size_t{0}, tiny_models().size()),
                         [](const auto& info) { return std::string(tiny_models()[info.param].name); });

const plan::ModelSpec& llama() { return tiny_models()[3].spec; }

TEST(CommunicationOf, EveryType) {
  run_ranks(4, [](World& world) {
    for (const int factor : {1, 2, 4})
      for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
        for (const auto reduction : {plan::Dtype::fp32, plan::Dtype::bf16})
          for (const auto gradient : {plan::Dtype::fp32, plan::Dtype::bf16}) {
            if (reduction == plan::Dtype::fp32 && gradient == plan::Dtype::bf16) continue;
            DataParallel layout{.replicate = 4 / factor,
                                .shard = factor,
                                .what = what,
                                .microbatches = 2,
                                .compute = plan::Dtype::bf16,
                                .gradient = gradient,
                                .reduction = reduction,
                                .keep = [](const std::string& name) { return name.find("norm") != std::string::npos; }};
            if (reduction == plan::Dtype::bf16) layout.compression = plan::Compression::bf16;
            compare(world, {.spec = llama(), .layout = layout});
          }
  });
}

TEST(CommunicationOf, OneGatherMoreIsNoticed) {
  run_ranks(4, [](World& world) {
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      Case run{.spec = llama(), .layout = {.replicate = 2, .shard = 2, .what = what}};
      const auto predicted = plan::collectives_of_step(describe(run), run.layout);
      EXPECT_TRUE(same(recorded(world, run), predicted, run.layout));
      run.one_more = true;
      EXPECT_FALSE(same(recorded(world, run), predicted, run.layout));
    }
  });
}

// A chain of Units that tells when backward has come to the first of them.
struct LongImpl : torch::nn::Module {
  explicit LongImpl(std::int64_t units) {
    for (std::int64_t at = 0; at < units; ++at) blocks.push_back(register_module(fmt::format("{}", at), Block(6)));
    testing::initialise(*this);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t at = 0; at < blocks.size(); ++at) {
      x = blocks[at]->forward(x);
      if (at == 0) x.register_hook([this](const at::Tensor&) { first_reached(); });
    }
    return x;
  }
  std::vector<Block> blocks;
  std::function<void()> first_reached;
};
BONFIRE_UNIT(Long);

// What is shared by a hybrid's replicas is reduced while backward still runs: a reduction over a shard group is followed by
// one over the replicas as soon as its memory is wanted again, whatever the links take.
TEST(CommunicationOf, AHybridReducesOverReplicasWhileBackwardRuns) {
  static constexpr std::int64_t units = 9;
  run_ranks(4, [](World& world) {
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters})
      for (const int prefetch : {0, 2}) {
        Long net(units);
        Engine engine = shard(world.mesh({.replicate = 2, .shard = 2}), net,
                              {.what = what, .prefetch = prefetch, .buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
        Sgd optimizer(engine, {.lr = 0.01});
        const auto across = [](const List& list) {
          return std::count_if(list.begin(), list.end(), [](const Collective& one) {
            return one.kind == CollectiveKind::all_reduce && one.axis == Axis::replicate;
          });
        };
        for (int step = 0; step < 3; ++step) {
          std::int64_t before_the_first = -1;
          net->first_reached = [&] { before_the_first = across(world.recorder().collectives()); };
          world.recorder().clear();
          world.recorder().start();
          engine.backward(net->forward(testing::numbers({3, 6}, 1)).pow(2).mean());
          world.recorder().stop();
          const auto list = world.recorder().collectives();
          EXPECT_EQ(across(list), units);
          optimizer.step();
          if (step == 0) continue;  // the order of backward is learned first
          // All but the first Unit's were on their way by then, and of these only so many that had not landed.
          const int limit = std::max(2, prefetch + 1);
          EXPECT_GE(before_the_first, units - 1 - limit) << plan::name_of(what) << ", prefetch " << prefetch;
          EXPECT_LT(before_the_first, units);
        }
      }
  });
}

}  // namespace
}  // namespace bonfire::communication_test
