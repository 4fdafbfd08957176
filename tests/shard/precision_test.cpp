// Number formats: of parameters, gradients, reductions, outputs and buffers, each of them chosen.
#include <cmath>
#include <limits>

#include <torch/nn/modules/normalization.h>

#include "bonfire/models/model.h"
#include "bonfire/optim/grad_scaler.h"
#include "tests/shard/twins.h"
#include "tests/support/tiny_training.h"

namespace bonfire::precision_test {
namespace {

using testing::Chain;
using testing::chain_input;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;

constexpr int steps = 4;

struct Format {
  const char* name;
  Precision precision;
  double tolerance;
};

bool is_norm_or_embedding(const std::string& name, const at::Tensor&) {
  return name.find("norm") != std::string::npos || name.find("embed") != std::string::npos;
}

const std::vector<Format>& formats() {
  static const std::vector<Format> all{
      {"bf16", {.parameters = at::kBFloat16}, 0.02},
      {"bf16, bf16 gradients", {.parameters = at::kBFloat16, .gradients = at::kBFloat16}, 0.02},
      {"bf16, bf16 reduction", {.parameters = at::kBFloat16, .reduction = at::kBFloat16}, 0.02},
      {"bf16, norms and embeddings kept", {.parameters = at::kBFloat16, .keep = is_norm_or_embedding}, 0.02},
      {"fp32, bf16 reduction", {.reduction = at::kBFloat16}, 0.01},
      {"fp16", {.parameters = at::kHalf, .scaled_loss = true}, 0.005},
      {"fp16, fp16 reduction", {.parameters = at::kHalf, .reduction = at::kHalf, .scaled_loss = true}, 0.005}};
  return all;
}

// The loss of each step of a tiny llama.
std::vector<double> curve(const World& world, const Sharding& sharding, const Precision& precision) {
  const auto& spec = testing::tiny_models()[3].spec;
  auto model = build_model(spec, {.seed = 5, .dtype = at::kFloat});
  const Mesh mesh = world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor});
  Engine engine = shard(mesh, *model, sharding.options({.precision = precision, .log = Log::silent()}));
  AdamW optimizer(engine, {.lr = 0.01});
  GradScaler scaler({.scale = 256});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    auto [input, target] = testing::tiny_data(spec, 0, world.rank() * 4, 4);
    const auto loss = model->loss(input, target);
    engine.backward(precision.scaled_loss ? scaler.scale(loss) : loss);
    EXPECT_FALSE(optimizer.step({.clip = 1.0, .scaler = precision.scaled_loss ? &scaler : nullptr}).skipped);
    losses.push_back(mesh.group(Axis::data).sum(loss.item<double>()) / world.size());
  }
  return losses;
}

TEST(Precisions, FollowTheCurveOfFp32) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    const auto exact = curve(world, {1, Sharded::none}, {});
    EXPECT_LT(exact.back(), 0.9 * exact.front());
    const std::vector<Sharding> where{
        {1, Sharded::none}, {2, Sharded::optimizer}, {4, Sharded::gradients}, {2, Sharded::parameters}};
    for (const auto& format : formats())
      for (const Sharding& sharding : where) {
        const auto rounded = curve(world, sharding, format.precision);
        for (int step = 0; step < steps; ++step)
          EXPECT_NEAR(rounded[step], exact[step], format.tolerance * exact[step]) << format.name << ", " << sharding.name();
      }
  });
}

// Microbatches add up in the type that gradients are kept in, whatever forward reads.
TEST(Precisions, GradientsAddUpInTheirOwnType) {
  struct OneImpl : torch::nn::Module {
    OneImpl() : weight(register_parameter("weight", at::ones({8}))) {}
    at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
    at::Tensor weight;
  };
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const auto kept : {at::kFloat, at::kBFloat16}) {
        struct Root : Unit<OneImpl> {};
        Root net;
        Engine engine = shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net,
                              sharding.options({.precision = {.parameters = at::kBFloat16, .gradients = kept}}));
        // Sixteen times less than bf16 can add to 1.
        engine.accumulate(net.forward(at::ones({8}, at::kBFloat16)));
        for (int micro = 0; micro < 31; ++micro) engine.accumulate(net.forward(at::full({8}, 0x1p-12, at::kBFloat16)));
        engine.backward(net.forward(at::full({8}, 0x1p-12, at::kBFloat16)));
        for (const auto& flat : engine.flats())
          for (const auto& share : flat->trained()) {
            EXPECT_EQ(share.gradient.scalar_type(), kept);
            EXPECT_EQ(share.master.scalar_type(), at::kFloat);
            const auto got = share.gradient.to(at::kDouble).max().item<double>();
            if (got == 0) continue;  // padding
            EXPECT_EQ(got, kept == at::kFloat ? 1 + 0x1p-7 : 1.0) << sharding.name();
          }
      }
  });
}

TEST(Precisions, OneRanksOverflowSkipsTheStepOfAll) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Chain net(3);
      net->to(at::kFloat);
      Engine engine = shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net,
                            sharding.options({.precision = {.parameters = at::kHalf, .scaled_loss = true}}));
      AdamW optimizer(engine, {.lr = 0.01});
      GradScaler scaler({.scale = 64});
      const auto weights = [&] {
        const auto whole = engine.full_parameters();
        std::vector<at::Tensor> all;
        for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().to(at::kFloat).reshape(-1));
        return at::cat(all);
      };
      for (int step = 0; step < 3; ++step) {
        const auto before = weights();
        const bool overflows = step == 1 && world.rank() == 2;
        const auto loss =
            net->forward(chain_input(world.rank(), step).to(at::kHalf), {0, 1, 2}).to(at::kFloat).pow(2).mean();
        engine.backward(scaler.scale(overflows ? loss * std::numeric_limits<float>::infinity() : loss));
        EXPECT_EQ(optimizer.step({.scaler = &scaler}).skipped, step == 1) << sharding.name();
        EXPECT_EQ(at::equal(before, weights()), step == 1) << sharding.name();
      }
      EXPECT_EQ(scaler.scale(), 32);
      EXPECT_EQ(optimizer.steps(), 2);
    }
  });
}

// A net with a norm and a buffer.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : linear(register_module("linear", torch::nn::Linear(6, 6))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        shift(register_buffer("shift", at::ones({6}))),
        count(register_buffer("count", at::zeros({1}, at::kLong))) {}
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    const auto y = linear->forward(x) + shift.to(x.scalar_type());
    return norm->forward(y.to(norm->weight.scalar_type()));
  }
  torch::nn::Linear linear;
  torch::nn::LayerNorm norm;
  at::Tensor shift, count;
  at::ScalarType seen = at::kDouble;
};
BONFIRE_UNIT(Normed);

TEST(Precisions, AreWhatWasAskedFor) {
  run_ranks(2, [](World& world) {
    for (const int factor : {1, 2}) {
      Normed net;
      Engine engine = shard(world.mesh({.replicate = 2 / factor, .shard = factor}), net,
                            {.what = Sharded::parameters,
                             .precision = {.parameters = at::kBFloat16,
                                           .outputs = at::kDouble,
                                           .buffers = at::kHalf,
                                           .keep = is_norm_or_embedding},
                             .start = Start::broadcast});
      const auto y = net->forward(at::ones({3, 6}));  // fp32: cast on its way in
      EXPECT_EQ(net->seen, at::kBFloat16);
      EXPECT_EQ(y.scalar_type(), at::kDouble);
      EXPECT_EQ(net->linear->weight.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->norm->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(net->shift.scalar_type(), at::kHalf);
      EXPECT_EQ(net->count.scalar_type(), at::kLong);
      engine.backward(y.sum());
      for (const auto& flat : engine.flats())
        for (const auto& share : flat->trained()) EXPECT_EQ(share.master.scalar_type(), at::kFloat);
    }
  });
}

// Law: whatever is sharded, a Unit is given floating-point arguments in the type of its parameters, and others as they are.
TEST(Precisions, InputsAreCastHoweverTheModelIsSharded) {
  struct UnmarkedRoot : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
    Normed inner = register_module("inner", Normed());
  };
  run_ranks(2, [](World& world) {
    const auto x = at::ones({3, 6});
    const auto train = [&](int factor, Sharded what, auto& net, auto& normed) {
      const Mesh mesh = world.mesh({.replicate = 2 / factor, .shard = factor});
      Engine engine = shard(mesh, net, {.what = what, .precision = {.parameters = at::kBFloat16}});
      Sgd optimizer(engine, {.lr = 0.1});
      for (int step = 0; step < 2; ++step) {
        const auto y = net->forward(x);
        EXPECT_EQ(normed->seen, at::kBFloat16) << plan::name_of(what);
        EXPECT_EQ(y.scalar_type(), at::kBFloat16);
        engine.backward(y.sum());
        optimizer.step();
      }
      EXPECT_EQ(x.scalar_type(), at::kFloat);
    };
    for (const auto& [factor, what] : {std::pair{1, Sharded::none},
                                       {1, Sharded::parameters},
                                       {2, Sharded::optimizer},
                                       {2, Sharded::gradients},
                                       {2, Sharded::parameters}}) {
      Normed net;
      train(factor, what, net, net);
    }
    auto net = std::make_shared<UnmarkedRoot>();
    train(1, Sharded::none, net, net->inner);
  });
}

}  // namespace
}  // namespace bonfire::precision_test
