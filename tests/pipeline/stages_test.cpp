// Stages: how Units are cut into them, what crosses the cuts, and what is refused.
#include <atomic>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>

#include "bonfire/nn/unit.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/pipeline/unit_costs.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::stages_test {
namespace {

using testing::numbers;
using testing::run_ranks;
using testing::skip_chain;

constexpr std::int64_t width = testing::skip_width;

TEST(Split, EvenlyByCostAndAsTold) {
  EXPECT_EQ(split_evenly(7, 3), (std::vector<UnitRange>{{0, 3}, {3, 5}, {5, 7}}));
  EXPECT_EQ(split_by_cost({1, 1, 1, 5, 1, 1}, 3), (std::vector<UnitRange>{{0, 3}, {3, 4}, {4, 6}}));
  EXPECT_EQ(split_as_told(4, {1, 3}), (std::vector<UnitRange>{{0, 1}, {1, 4}}));
  EXPECT_THROW(split_evenly(3, 4), ConfigError);
  EXPECT_THROW(split_as_told(4, {1, 2}), ConfigError);
}

// The longest stage is as short as any cut makes it.
TEST(Split, ByCostIsTheBestThereIs) {
  for (int seed = 0; seed < 20; ++seed) {
    std::vector<double> costs;
    for (int unit = 0; unit < 8; ++unit) costs.push_back((seed * 37 + unit * unit * 11) % 17);
    const auto longest = [&](const std::vector<UnitRange>& ranges) {
      double most = 0;
      for (const auto& range : ranges) {
        double sum = 0;
        for (int unit = range.begin; unit < range.end; ++unit) sum += costs[static_cast<std::size_t>(unit)];
        most = std::max(most, sum);
      }
      return most;
    };
    double best = 1e9;
    for (int first = 1; first < 7; ++first)
      for (int second = first + 1; second < 8; ++second)
        best = std::min(best, longest({{0, first}, {first, second}, {second, 8}}));
    EXPECT_EQ(longest(split_by_cost(costs, 3)), best);
  }
}

// Units whose passes take as long as they say, by a clock that only they move.
struct Costly {
  double forward, backward;
};

Chain costly_chain(const std::vector<Costly>& costs, std::shared_ptr<double> milliseconds) {
  Chain chain;
  for (std::size_t unit = 0; unit < costs.size(); ++unit) chain.units.push_back(fmt::format("unit{}", unit));
  chain.build = [costs, milliseconds](UnitRange range) {
    return StageModule{std::make_shared<torch::nn::Module>(), [=](Tensors values, const Microbatch&) {
                         for (int unit = range.begin; unit < range.end; ++unit) {
                           const auto& cost = costs[static_cast<std::size_t>(unit)];
                           *milliseconds += cost.forward;
                           if (unit == 0) values[0] = values[0].detach().set_requires_grad(true);
                           values[0] = values[0] * 2;
                           values[0].register_hook([=](const at::Tensor&) { *milliseconds += cost.backward; });
                         }
                         const bool last = range.end == static_cast<int>(costs.size());
                         return last ? Tensors{values[0].sum()} : values;
                       }};
  };
  return chain;
}

TEST(UnitCosts, AreForwardAndBackwardOfEachAndAllRanksHearThem) {
  const std::vector<Costly> costs{{1, 2}, {1, 1}, {10, 30}, {1, 2}, {2, 2}};
  const Microbatch example{.input = {numbers({2, width}, 0)}};
  run_ranks(2, [&](World& world) {
    // Other ranks' clocks stand still.
    auto milliseconds = std::make_shared<double>(0);
    const CostOptions options{.repeats = 2,
                              .clock = [milliseconds] { return static_cast<Nanoseconds>(*milliseconds * 1e6); }};
    const auto agreed = agreed_costs(world.mesh({.pipeline = 2}), costly_chain(costs, milliseconds), example, options);
    ASSERT_EQ(agreed.size(), costs.size());
    for (std::size_t unit = 0; unit < costs.size(); ++unit)
      EXPECT_NEAR(agreed[unit], 1e-3 * (costs[unit].forward + costs[unit].backward), 1e-9) << "Unit " << unit;
    EXPECT_EQ(*milliseconds > 0, world.rank() == 0);
    EXPECT_EQ(split_by_cost(agreed, 3), (std::vector<UnitRange>{{0, 2}, {2, 3}, {3, 5}}));
  });
}

TEST(UnitCosts, WhatFailsInMeasuringIsHeardByAll) {
  auto chain = skip_chain(3);
  chain.build = [](UnitRange) -> StageModule { fail("cannot be built"); };
  std::atomic<int> heard = 0;
  run_ranks(2, [&](World& world) {
    try {
      agreed_costs(world.mesh({.pipeline = 2}), chain, {.input = {numbers({2, width}, 0)}});
    } catch (const Error& error) {
      heard += std::string(error.what()) == "measuring the Units: cannot be built";
    }
  });
  EXPECT_EQ(heard, 2);
}

// Every rank says the same, in one line.
std::vector<std::string> refusals(int ranks, const std::function<void(World&)>& body) {
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    try {
      body(world);
    } catch (const ConfigError& error) {
      said[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  return said;
}

PipelineOptions with(const std::string& name, int ranks, int microbatches = 2) {
  return {.schedule = schedule::generate(name, {.ranks = ranks, .microbatches = microbatches}), .schedule_name = name};
}

// A Unit, and the one after it that is not marked as one.
struct MarkedImpl : torch::nn::Module {
  MarkedImpl() : weight(register_parameter("weight", at::ones({width}, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
BONFIRE_UNIT(Marked);

Chain half_marked_chain() {
  Chain chain{.units = {"marked", "plain"}};
  chain.build = [](UnitRange range) {
    if (range.begin == 0) {
      Marked marked;
      return StageModule{
          marked.ptr(), [marked](Tensors values, const Microbatch&) mutable { return Tensors{marked->forward(values[0])}; }};
    }
    auto plain = std::make_shared<MarkedImpl>();
    return StageModule{plain,
                       [plain](Tensors values, const Microbatch&) { return Tensors{plain->forward(values[0]).sum()}; }};
  };
  return chain;
}

// What only one of the stages cannot be is said by all ranks: the others do not wait for it.
TEST(Stages, WhatOneOfThemCannotBeIsHeardByAll) {
  const auto expect_heard = [](const MeshShape& shape, const Chain& chain, const ShardOptions& shard, const char* words) {
    const auto all = refusals(shape.size(), [&](World& world) {
      auto options = with("1f1b", 2);
      options.shard = shard;
      Pipeline(world.mesh(shape), chain, options);
    });
    for (const auto& said : all) EXPECT_EQ(said, words);
  };
  expect_heard({.pipeline = 2, .shard = 2}, half_marked_chain(),
               {.what = Sharded::parameters, .reshard_after_forward = true},
               "stage 1 (Unit 1): parameter 'weight' of a stage is part of no Unit, and with reshard_after_forward = true "
               "Units are gathered one by one; allowed: declare the module of the stage, or the one that holds it, with "
               "BONFIRE_UNIT, or reshard_after_forward = false");
}

TEST(Stages, OneThatCannotBeBuiltIsHeardByAll) {
  auto chain = half_marked_chain();
  chain.build = [build = chain.build](UnitRange range) {
    if (range.begin == 1) fail("out of clay");
    return build(range);
  };
  run_ranks(2, [&](World& world) {
    const auto words = testing::thrown<Error>([&] { Pipeline(world.mesh({.pipeline = 2}), chain, with("1f1b", 2)); });
    EXPECT_EQ(words, "stage 1 (Unit 1): out of clay");
  });
}

// What is wrong with the options is no stage's mistake.
TEST(Stages, OptionsThatNoStageCanHave) {
  for (const auto& said : refusals(2, [](World& world) {
         auto options = with("1f1b", 2);
         options.shard.negotiate_order = true;
         Pipeline(world.mesh({.pipeline = 2}), skip_chain(3), options);
       }))
    EXPECT_EQ(said,
              "negotiate_order in a pipeline: its schedule runs the Units in one order on all ranks, so there is nothing to "
              "agree on; allowed: one of the two");
  // Of gathers Unit by Unit, where stages are gathered whole.
  const auto of_units = [](const ShardOptions& shard) {
    const auto all = refusals(4, [&](World& world) {
      auto options = with("1f1b", 2);
      options.shard = shard;
      options.shard.what = Sharded::parameters;
      Pipeline(world.mesh({.pipeline = 2, .shard = 2}), skip_chain(3), options);
    });
    for (const auto& said : all) EXPECT_EQ(said, all.front());
    return all.front();
  };
  EXPECT_EQ(of_units({.backward_prefetch = BackwardPrefetch::after_reduction}),
            "backward_prefetch = after_reduction in a pipeline whose schedule says when whole stages are gathered; allowed: "
            "before_reduction, or reshard_after_forward = true");
  EXPECT_EQ(of_units({.debug = true}),
            "debug = true in a pipeline whose schedule gathers and frees whole stages: all parameters of a stage are there "
            "while its Units run, so nothing would be checked; allowed: false, or reshard_after_forward = true");
}

TEST(Stages, MoreStagesThanUnits) {
  try {
    pipeline_table(skip_chain(3), with("1f1b", 4), {});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "4 stages for a model of 3 Units: a stage has at least one; allowed: up to 3 stages (pipeline x chunks)");
  }
}

TEST(Stages, ATableWithAMissingSend) {
  const auto table = schedule::parse_table("rank 0: 0F0 0SF0 0RB0 0B0\nrank 1: 1RF0 1F0 1B0\n", "mine.txt");
  try {
    pipeline_table(skip_chain(3), {.schedule = table, .schedule_name = "mine.txt"}, {});
    FAIL();
  } catch (const schedule::ScheduleError& error) {
    EXPECT_NE(std::string(error.what()).find("the send '1SB0' is missing"), std::string::npos) << error.what();
  }
}

struct InOnePiece : torch::autograd::Function<InOnePiece> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& weight) {
    return x + weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], gradients[0].sum(0)};
  }
};

struct OpaqueImpl : torch::nn::Module {
  OpaqueImpl() : weight(register_parameter("weight", at::ones({width}, at::kDouble))) {}
  at::Tensor weight;
};

Chain opaque_chain(const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>& function) {
  Chain chain{.units = {"first", "second", "third"}};
  chain.build = [function](UnitRange range) {
    auto module = std::make_shared<OpaqueImpl>();
    return StageModule{module, [=](Tensors values, const Microbatch&) {
                         auto out = range.contains(1) ? function(values[0], module->weight) : values[0] * module->weight;
                         return Tensors{range.end == 3 ? out.sum() : out};
                       }};
  };
  return chain;
}

TEST(Stages, ABackwardInOnePieceIsRefusedWhereTheScheduleSplitsIt) {
  const auto chain =
      opaque_chain([](const at::Tensor& x, const at::Tensor& weight) { return InOnePiece::apply(x, weight); });
  const std::vector<Microbatch> batch(3, {.input = {numbers({2, width}, 0)}});
  const auto expect_refused = [](const std::vector<std::string>& all) {
    for (const auto& said : all) {
      EXPECT_NE(said.find("stage 1 (Unit 1): the schedule splits backward into halves, but"), std::string::npos) << said;
      EXPECT_NE(said.find("InOnePiece makes the gradients of its input and of its parameters in one piece"),
                std::string::npos);
      EXPECT_EQ(said.find('\n'), std::string::npos);
    }
  };
  expect_refused(
      refusals(3, [&](World& world) { Pipeline(world.mesh({.pipeline = 3}), chain, with("zb-h1", 3, 3)).step(batch); }));
  // With an example, before there is a pipeline.
  expect_refused(refusals(3, [&](World& world) {
    auto options = with("zb-h1", 3, 3);
    options.example = batch.front();
    Pipeline pipeline(world.mesh({.pipeline = 3}), chain, options);
    ADD_FAILURE() << "rank " << world.rank();
  }));
  for (const auto& said :
       refusals(3, [&](World& world) { Pipeline(world.mesh({.pipeline = 3}), chain, with("1f1b", 3, 3)).step(batch); }))
    EXPECT_EQ(said, "");
}

TEST(Stages, WhatCannotCrossACutIsNamed) {
  const std::vector<Microbatch> batch(2, {.input = {numbers({2, width}, 0)}});
  const auto says = [&](const std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>& function,
                        const std::string& words) {
    for (const auto& said : refusals(3, [&](World& world) {
           Pipeline(world.mesh({.pipeline = 3}), opaque_chain(function), with("1f1b", 3)).step(batch);
         }))
      EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  says([](const at::Tensor& x, const at::Tensor&) { return x.sum(); },
       "stage 1 (Unit 1): value 0 of 1 that goes to the next stage is Double [] for 2 samples: its first dimension must be");
  says([](const at::Tensor& x, const at::Tensor&) { return x > 0; }, "allowed are fp32, fp64, bf16, fp16, int64 and uint8");
  says(
      [](const at::Tensor& x, const at::Tensor& weight) {
        return x.matmul(weight.view({1, width}));
      },
      "stage 1 (Unit 1): forward failed on what came in, Double [n, 6]: ");
}

TEST(Stages, AShapeThatChangesIsNamed) {
  auto chain = opaque_chain([](const at::Tensor& x, const at::Tensor& weight) {
    return x.size(0) == 2 ? x * weight : (x * weight).narrow(1, 0, 5);
  });
  run_ranks(3,
            [&](World& world) {
              Pipeline pipeline(world.mesh({.pipeline = 3}), chain, with("gpipe", 3, 1));
              pipeline.step({{.input = {numbers({2, width}, 0)}}});
              for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
              // The others hear of it only by waiting for what never comes.
              if (world.rank() == 2) return;
              try {
                pipeline.step({{.input = {numbers({3, width}, 0)}}});
                ADD_FAILURE() << "rank " << world.rank();
              } catch (const Error& error) {
                if (world.rank() == 0) return;
                EXPECT_NE(std::string(error.what())
                              .find("microbatch 0 of 3 samples makes Double [n, 5] for the next stage; agreed was "
                                    "Double [n, 6]"),
                          std::string::npos)
                    << error.what();
              }
            },
            {.timeout = std::chrono::seconds(3)});
}

TEST(Stages, BuffersAreNotTouchedByTheAgreement) {
  Chain chain{.units = {"first", "second"}};
  chain.build = [](UnitRange range) {
    torch::nn::BatchNorm1d norm(width);
    norm->to(at::kDouble);
    return StageModule{norm.ptr(), [norm, range](Tensors values, const Microbatch&) mutable {
                         auto out = norm->forward(values[0]);
                         return Tensors{range.end == 2 ? out.pow(2).mean() : out};
                       }};
  };
  run_ranks(2, [&](World& world) {
    Pipeline pipeline(world.mesh({.pipeline = 2}), chain, with("gpipe", 2, 1));
    pipeline.step({{.input = {numbers({4, width}, 0)}}});
    auto& norm = dynamic_cast<torch::nn::BatchNorm1dImpl&>(pipeline.module(world.rank()));
    EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 1);
  });
}

}  // namespace
}  // namespace bonfire::stages_test
