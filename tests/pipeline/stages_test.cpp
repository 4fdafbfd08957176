// Chains of other people's modules: several values across a cut, tied weights under other names, and what is refused.
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"
#include "tests/support/ranks.h"

namespace bonfire {
namespace {

using testing::run_ranks;

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

at::Tensor numbers(at::IntArrayRef shape, double shift) {
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  return at::arange(count, at::kDouble).add(shift).mul(1.3).sin().mul(0.5).view(shape);
}

constexpr std::int64_t width = 6;

// One Unit: a linear layer whose output goes on beside what the first Unit made, which the last one adds. The first and the
// last share a weight.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int unit, bool last)
      : linear(register_module("linear", torch::nn::Linear(width, width))),
        shared(register_parameter(last ? "output" : "input", numbers({width, width}, 77))) {
    linear->to(at::kDouble);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(numbers({width, width}, unit));
    linear->bias.copy_(numbers({width}, unit + 0.5));
  }
  torch::nn::Linear linear;
  at::Tensor shared;
};

// Units 0..units-1 as one function of a list of values.
struct PartImpl : torch::nn::Module {
  PartImpl(UnitRange range, int of) : units(range), all(of) {
    for (int unit = range.begin; unit < range.end; ++unit)
      blocks.push_back(register_module(fmt::format("block{}", unit), std::make_shared<BlockImpl>(unit, unit + 1 == of)));
  }
  Tensors run(Tensors values, const Microbatch& microbatch) {
    for (int unit = units.begin; unit < units.end; ++unit) {
      auto& block = *blocks[static_cast<std::size_t>(unit - units.begin)];
      if (unit == 0) {
        const auto skip = values[0].matmul(block.shared);
        // Along goes what needs no gradient, too.
        values = {values[0], skip, at::arange(values[0].size(0)).remainder(2).unsqueeze(1)};
      }
      values[0] = values[0] + block.linear->forward(values[0]).tanh();
      if (unit + 1 < all) continue;
      const auto out = values[0].matmul(block.shared.t()) + values[1] * values[2];
      const auto wrong = out - microbatch.target[0];
      return {wrong.pow(2).sum(1).mean(), wrong.abs().max().detach()};
    }
    return values;
  }
  UnitRange units;
  int all;
  std::vector<std::shared_ptr<BlockImpl>> blocks;
};

Chain skip_chain(int units) {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back(fmt::format("block{}", unit));
  chain.build = [units](UnitRange range) {
    auto part = std::make_shared<PartImpl>(range, units);
    if (range.begin == 0 && range.end == units) {
      // One tensor where both uses are in one stage.
      part->blocks.back()->shared = part->blocks.front()->shared;
    }
    return StageModule{
        part, [part](Tensors values, const Microbatch& microbatch) { return part->run(std::move(values), microbatch); }};
  };
  chain.tied = {{{{0, "block0.input"}, {units - 1, fmt::format("block{}.output", units - 1)}}}};
  return chain;
}

std::vector<Microbatch> skip_batch(int microbatches, int step) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < microbatches; ++at) {
    const std::int64_t samples = 2 + at % 2;
    batch.push_back({.input = {numbers({samples, width}, 10 * step + at)}, .target = {numbers({samples, width}, at + 3)}});
  }
  return batch;
}

TEST(Stages, SkipConnectionsAndTiesOfOtherPeoplesModules) {
  constexpr int units = 5, microbatches = 4, steps = 3;
  constexpr double rate = 0.05;
  // By plain torch.
  auto whole = skip_chain(units).build({0, units});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto batch = skip_batch(microbatches, step);
    std::int64_t samples = 0;
    double sum = 0;
    for (const auto& microbatch : batch) samples += microbatch.samples();
    for (const auto& microbatch : batch) {
      const auto loss = whole.forward(microbatch.input, microbatch)[0] *
                        (static_cast<double>(microbatch.samples()) / static_cast<double>(samples));
      sum += loss.item<double>();
      loss.backward();
    }
    losses.push_back(sum);
    const at::NoGradGuard no_grad;
    for (auto& parameter : whole.module->parameters())
      if (parameter.grad().defined()) parameter.sub_(parameter.grad() * rate), parameter.mutable_grad().reset();
  }
  const auto expected = whole.module->named_parameters();

  for (const auto* name : {"gpipe", "1f1b", "zb-h1", "zb-v"})
    for (const int ranks : {2, 4}) {
      const int chunks = schedule::natural_chunks(name);
      if (ranks * chunks > units) continue;
      run_ranks(ranks, [&](World& world) {
        SCOPED_TRACE(fmt::format("{}, {} ranks", name, ranks));
        Pipeline pipeline(
            world.mesh({.pipeline = ranks}), skip_chain(units),
            {.schedule = schedule::generate(name, {.ranks = ranks, .microbatches = microbatches, .chunks = chunks}),
             .schedule_name = name});
        std::vector<std::unique_ptr<Sgd>> optimizers;
        for (const int stage : pipeline.local_stages())
          optimizers.push_back(std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate}));
        for (int step = 0; step < steps; ++step) {
          const auto report = pipeline.step(skip_batch(microbatches, step));
          EXPECT_NEAR(report.loss, losses[static_cast<std::size_t>(step)], 1e-12);
          EXPECT_EQ(report.reports.size(), 1u);
          for (auto& optimizer : optimizers) optimizer->step();
        }
        for (const int stage : pipeline.local_stages())
          for (const auto& item : pipeline.module(stage).named_parameters()) {
            // Only the first and the last Unit use the shared weight.
            if (item.key().ends_with("input") && item.key() != "block0.input") continue;
            const auto& same = expected[item.key().ends_with("output") ? "block0.input" : item.key()];
            EXPECT_LT((item.value() - same).abs().max().item<double>(), 1e-12) << item.key();
          }
      });
    }
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
  for (const auto& said :
       refusals(3, [&](World& world) { Pipeline(world.mesh({.pipeline = 3}), chain, with("zb-h1", 3, 3)).step(batch); })) {
    EXPECT_NE(said.find("stage 1 (Unit 1): the schedule splits backward into halves, but"), std::string::npos) << said;
    EXPECT_NE(said.find("InOnePiece makes the gradients of its input and of its parameters in one piece"),
              std::string::npos);
  }
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
                              .find("microbatch 0 of 3 samples makes Double [n, 5] for the next stage; agreed at the "
                                    "start was Double [n, 6]"),
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
}  // namespace bonfire
