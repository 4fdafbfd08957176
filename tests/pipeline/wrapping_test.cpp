// What a Wrapping names may be on any of the stages: each has what it has of it.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipedream.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

namespace bonfire::wrapping_test {
namespace {

using testing::numbers;
using testing::run_ranks;
using testing::thrown;

constexpr std::int64_t width = 6;
constexpr double rate = 0.1;
constexpr int units = 4, steps = 3;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int unit) : linear(register_module("linear", torch::nn::Linear(width, width))) {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    double shift = 10 * unit;
    for (auto& parameter : parameters()) parameter.copy_(numbers(parameter.sizes(), shift += 3));
  }
  at::Tensor forward(const at::Tensor& x) { return x + linear->forward(x).tanh(); }
  torch::nn::Linear linear;
};
struct AlphaImpl : LayerImpl {
  using LayerImpl::LayerImpl;
};
struct BetaImpl : LayerImpl {
  using LayerImpl::LayerImpl;
};
BONFIRE_UNIT(Alpha);
BONFIRE_UNIT(Beta);

// Two Units of one type, and two of another.
struct RowImpl : torch::nn::Module {
  explicit RowImpl(UnitRange range) : last(range.end == units) {
    for (int unit = range.begin; unit < range.end; ++unit) {
      const auto name = fmt::format("u{}", unit);
      if (unit < 2)
        alphas.push_back(register_module(name, Alpha(unit)));
      else
        betas.push_back(register_module(name, Beta(unit)));
    }
  }
  at::Tensor run(at::Tensor x, const Microbatch& microbatch) {
    for (auto& alpha : alphas) x = alpha->forward(x);
    for (auto& beta : betas) x = beta->forward(x);
    return last ? (x - microbatch.target[0]).pow(2).mean() : x;
  }
  bool last;
  std::vector<Alpha> alphas;
  std::vector<Beta> betas;
};

Chain row_chain() {
  Chain chain{.units = {"u0", "u1", "u2", "u3"}};
  chain.build = [](UnitRange range) {
    auto row = std::make_shared<RowImpl>(range);
    return StageModule{
        row, [row](Tensors values, const Microbatch& microbatch) { return Tensors{row->run(values[0], microbatch)}; }};
  };
  return chain;
}

std::vector<Microbatch> batch_of(int step, int data_rank) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < 2; ++at)
    batch.push_back({.input = {numbers({3, width}, 10 * data_rank + at + 40 * step)},
                     .target = {numbers({3, width}, at + 5 + 3 * data_rank)}});
  return batch;
}

// What plain torch makes of it on `data_ranks` ranks; parameters whose names begin with one of `untouched` stay.
std::map<std::string, at::Tensor> plainly(int data_ranks, const std::vector<std::string>& untouched) {
  RowImpl row({0, units});
  std::map<std::string, at::Tensor> weights;
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < data_ranks; ++rank)
      for (const auto& microbatch : batch_of(step, rank))
        (row.run(microbatch.input[0], microbatch) / (2 * data_ranks)).backward();
    const at::NoGradGuard no_grad;
    for (auto& item : row.named_parameters()) {
      const bool stays =
          std::any_of(untouched.begin(), untouched.end(), [&](const auto& name) { return item.key().starts_with(name); });
      if (!stays) item.value().sub_(item.value().grad() * rate);
      item.value().mutable_grad().reset();
      weights[item.key()] = item.value().detach().clone();
    }
  }
  return weights;
}

// Trains on two stages of two ranks each, as plain torch does. Returns how many buffers each stage has.
std::vector<std::size_t> flats_of_stages(const ShardOptions& shard, const std::vector<std::string>& untouched = {}) {
  const auto expected = plainly(2, untouched);
  std::vector<std::size_t> flats(2);
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.pipeline = 2, .shard = 2});
    PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2}), .shard = shard};
    Pipeline pipeline(mesh, row_chain(), options);
    Sgd sgd(pipeline, {.lr = rate});
    for (int step = 0; step < steps; ++step) {
      pipeline.step(batch_of(step, mesh.coordinate(Axis::data)));
      sgd.step();
    }
    const int stage = pipeline.local_stages().front();
    if (mesh.coordinate(Axis::data) == 0) flats[static_cast<std::size_t>(stage)] = pipeline.engine(stage).flats().size();
    const auto whole = pipeline.engine(stage).full_parameters();
    for (const auto& item : pipeline.module(stage).named_parameters())
      EXPECT_LT((item.value().detach() - expected.at(item.key())).abs().max().item<double>(), 1e-13) << item.key();
  });
  return flats;
}

TEST(StageWrapping, TypesMayBeOnOneStage) {
  using Counts = std::vector<std::size_t>;
  const auto of_types = [](const std::vector<std::string>& types, bool gathers_units) {
    ShardOptions shard{.what = Sharded::parameters, .wrapping = {.types = types}};
    if (gathers_units) shard.reshard_after_forward = true;
    return flats_of_stages(shard);
  };
  EXPECT_EQ(of_types({}, false), (Counts{2, 2}));
  // The other stage has one buffer: none of its Units is chosen, and not each of them.
  EXPECT_EQ(of_types({"Alpha"}, false), (Counts{2, 1}));
  EXPECT_EQ(of_types({"Beta"}, false), (Counts{1, 2}));
  EXPECT_EQ(of_types({"Alpha", "Beta"}, false), (Counts{2, 2}));
  EXPECT_EQ(of_types({"Alpha", "Beta"}, true), (Counts{2, 2}));
}

TEST(StageWrapping, WhatIsIgnoredMayBeOnOneStage) {
  for (const Sharded what : {Sharded::optimizer, Sharded::parameters}) {
    flats_of_stages({.what = what, .wrapping = {.ignored_modules = {"u0.linear"}}}, {"u0."});
    flats_of_stages({.what = what, .wrapping = {.ignored_parameters = {"u3.linear.bias"}}}, {"u3.linear.bias"});
    flats_of_stages({.what = what, .wrapping = {.ignored_modules = {"u2"}, .ignored_parameters = {"u1.linear.weight"}}},
                    {"u2.", "u1.linear.weight"});
  }
}

// All ranks say the same, before any of them has an Engine.
template <class Make>
std::string refusal(int ranks, const Make& make) {
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  run_ranks(ranks,
            [&](World& world) { said[static_cast<std::size_t>(world.rank())] = thrown<ConfigError>([&] { make(world); }); });
  for (const auto& words : said) EXPECT_EQ(words, said.front());
  return said.front();
}

std::string refusal(const Chain& chain, const Wrapping& wrapping) {
  return refusal(2, [&](World& world) {
    PipelineOptions options{.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})};
    options.shard.wrapping = wrapping;
    Pipeline(world.mesh({.pipeline = 2}), chain, options);
  });
}

TEST(StageWrapping, ANameThatNoStageHasIsRefused) {
  EXPECT_EQ(refusal(row_chain(), {.ignored_modules = {"u2", "u0.liner"}}),
            "ignored module 'u0.liner' does not exist; did you mean 'u0.linear'?");
  EXPECT_EQ(refusal(row_chain(), {.ignored_parameters = {"u0.linear.bias", "u3.linear.bia"}}),
            "ignored parameter 'u3.linear.bia' does not exist; did you mean 'u3.linear.bias'?");
  EXPECT_EQ(refusal(row_chain(), {.types = {"Beta", "Gamma"}}),
            "wrapping type 'Gamma' is not a Unit of any stage; there are: Alpha, Beta");
  // What contradicts itself does so on the stages that have the type.
  EXPECT_NE(refusal(row_chain(), {.types = {"Beta"}, .all_in_one = true}).find("choose one"), std::string::npos);
}

// Nobody would sum the gradients of a copy that its stage ignores.
TEST(StageWrapping, ATiedWeightCannotBeIgnored) {
  for (const auto* name : {"block0.input", "block2.output"}) {
    const auto said = refusal(testing::skip_chain(3), {.ignored_parameters = {name}});
    EXPECT_NE(said.find(fmt::format("'{}' of stage ", name)), std::string::npos) << said;
    EXPECT_NE(said.find("is ignored, and tied to weights of other stages"), std::string::npos) << said;
  }
}

TEST(StageWrapping, PipeDreamHasItToo) {
  const auto make = [](World& world, const Wrapping& wrapping) {
    PipeDreamOptions options{.robin = {.replicas = {1, 1}}, .example = batch_of(0, 0).front()};
    options.shard.wrapping = wrapping;
    return PipeDream(world.mesh({.pipeline = 2}), row_chain(), options);
  };
  run_ranks(2, [&](World& world) {
    auto pipeline = make(world, {.types = {"Alpha"}, .ignored_parameters = {"u3.linear.bias"}});
    std::vector<std::string> names;
    for (const auto& flat : pipeline.engine().flats())
      for (const auto& segment : flat->layout().segments) names.push_back(segment.name);
    EXPECT_EQ(names.size(), pipeline.stage() == 0 ? 4u : 3u);
    EXPECT_EQ(std::count(names.begin(), names.end(), "u3.linear.bias"), 0);
  });
  EXPECT_EQ(refusal(2, [&](World& world) { make(world, {.types = {"Gamma"}}); }),
            "wrapping type 'Gamma' is not a Unit of any stage; there are: Alpha, Beta");
}

}  // namespace
}  // namespace bonfire::wrapping_test
