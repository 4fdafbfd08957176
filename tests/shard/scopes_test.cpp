// Around training: reading and changing whole parameters, ranks without data, buffers, how it starts, and odd sizes.
#include <torch/nn/modules/batchnorm.h>

#include "bonfire/nn/sequential.h"
#include "tests/shard/twins.h"

namespace bonfire::scopes_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::initialise;
using testing::numbers;
using testing::run_ranks;
using testing::Sharding;
using testing::shardings;
using testing::Twins;

const testing::Order order{0, 1, 2};

at::Tensor loss_of(Chain& net, int rank, int step) { return net->forward(chain_input(rank, step), order).pow(2).mean(); }

TEST(FullParameters, CanBeReadAndChanged) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(3); });
      const auto change = [](Chain& net) {
        const at::NoGradGuard no_grad;
        net->blocks[1]->linear->weight.mul_(0.5);
        net->head->bias.add_(1);
      };
      for (int step = 0; step < 4; ++step) {
        twins.step([&](Chain& net, int rank) { return loss_of(net, rank, step); });
        {
          const auto read = twins.engine.full_parameters();
          const at::NoGradGuard no_grad;
          // Of a scope that only reads, nothing is kept where others hold the memory.
          if (twins.engine.factors().parameters > 1) twins.ours->head->weight.zero_();
        }
        {
          const auto write = twins.engine.full_parameters(/*write=*/true);
          change(twins.ours);
        }
        change(twins.theirs);
      }
      twins.expect_equal();
    }
  });
}

TEST(FullParameters, ScopesMayNestAndModelsRunInsideThem) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(3); }, {.log = Log::silent()});
      for (int step = 0; step < 3; ++step) {
        twins.step([&](Chain& net, int rank) { return loss_of(net, rank, step); });
        const auto outer = twins.engine.full_parameters();
        { const auto inner = twins.engine.full_parameters(); }
        const double before = twins.ours->head->weight.sum().item<double>();
        const at::NoGradGuard no_grad;
        loss_of(twins.ours, 0, 0);
        EXPECT_EQ(twins.ours->head->weight.sum().item<double>(), before);
        for (const auto& parameter : twins.ours->parameters()) EXPECT_NE(parameter.const_data_ptr(), nullptr);
      }
      // Between forward and backward.
      twins.step([&](Chain& net, int rank) {
        const auto loss = loss_of(net, rank, 9);
        if (&net == &twins.ours) {
          const auto read = twins.engine.full_parameters();
        }
        return loss;
      });
      twins.expect_equal();
    }
  });
}

// A master keeps what its rounded copy does not show, unless that was changed.
TEST(FullParameters, ChangesKeepTheMastersOfTheRest) {
  run_ranks(2, [](World& world) {
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      Chain net(3);
      net->to(at::kFloat);
      Engine engine = shard(world.mesh({.shard = 2}), net, {.what = what, .precision = {.parameters = at::kBFloat16}});
      const auto masters = [&] {
        std::vector<at::Tensor> all;
        for (const auto& flat : engine.flats())
          for (const auto& share : flat->trained()) all.push_back(share.master.clone());
        return at::cat(all);
      };
      const auto before = masters();
      {
        const auto write = engine.full_parameters(/*write=*/true);
        const at::NoGradGuard no_grad;
        net->blocks[0]->gain.fill_(2);
      }
      const auto changed = masters().ne(before);
      EXPECT_EQ(world.group().sum(changed.sum().item<double>()), 6);
      EXPECT_EQ(world.group().sum(masters().masked_select(changed).sum().item<double>()), 12);
    }
  });
}

// Rank r has r + 1 batches, each of `microbatches` parts; those that have none take part in the others' steps.
TEST(UnevenInputs, AverageOverTheRanksThatHaveData) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const int microbatches : {1, 3}) {
        Twins<Chain> twins(world, sharding, [] { return Chain(3); }, {.uneven_inputs = true, .log = Log::silent()});
        const auto number = [&](int step, int micro) { return 10 * step + micro; };
        for (int step = 0; step <= world.rank(); ++step) {
          for (int micro = 0; micro + 1 < microbatches; ++micro)
            twins.engine.accumulate(loss_of(twins.ours, world.rank(), number(step, micro)));
          // An evaluation of those that are still there.
          const at::NoGradGuard no_grad;
          if (step == 1) loss_of(twins.ours, world.rank(), 7);
          const at::AutoGradMode grad(true);
          twins.engine.backward(loss_of(twins.ours, world.rank(), number(step, microbatches - 1)));
          twins.optimizer.step();
        }
        twins.engine.finish([&] { twins.optimizer.step(); });
        for (int step = 0; step < world.size(); ++step) {
          for (int rank = step; rank < world.size(); ++rank)
            for (int micro = 0; micro < microbatches; ++micro)
              (loss_of(twins.theirs, rank, number(step, micro)) / (world.size() - step)).backward();
          twins.update_theirs();
        }
        twins.expect_equal();
      }
  });
}

struct NormNetImpl : torch::nn::Module {
  NormNetImpl()
      : block(register_module("block", Block(6))),
        norm(register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(6)))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return norm->forward(block->forward(x)); }
  Block block;
  torch::nn::BatchNorm1d norm;
};
BONFIRE_UNIT(NormNet);

TEST(Buffers, AreThoseOfRankZero) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings())
      for (const bool kept_equal : {true, false}) {
        NormNet net;
        Engine engine = shard(world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor}), net,
                              sharding.options({.keep_buffers_equal = kept_equal}));
        engine.backward(net->forward(numbers({4, 6}, static_cast<std::uint64_t>(world.rank()))).pow(2).mean());
        const double mean = net->norm->running_mean.sum().item<double>();
        EXPECT_EQ(world.group().max(mean) == -world.group().max(-mean), kept_equal) << sharding.name();
        EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 1);
      }
  });
}

TEST(Start, BroadcastsOrRefuses) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      const auto make = [&] {
        NormNet net;
        const at::NoGradGuard no_grad;
        net->block->gain.add_(world.rank());
        net->norm->running_mean.add_(world.rank());
        return net;
      };
      const Mesh mesh = world.mesh({.replicate = 4 / sharding.factor, .shard = sharding.factor});
      auto net = make();
      Engine engine = shard(mesh, net, sharding.options());
      engine.check_equal();
      EXPECT_EQ(net->norm->running_mean.sum().item<double>(), 0);
      const auto whole = engine.full_parameters();
      EXPECT_TRUE(at::equal(net->block->gain, NormNet()->block->gain));
      try {
        auto other = make();
        shard(mesh, other, sharding.options({.start = Start::check}));
        ADD_FAILURE();
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("parameter 'block.gain' differs between rank 0 and rank 1"),
                  std::string::npos)
            << error.what();
      }
    }
  });
}

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(at::IntArrayRef shape) : weight(register_parameter("weight", at::ones(shape))) {}
  at::Tensor forward(const at::Tensor& x) {
    return weight.numel() == 0 ? x + weight.sum() : x * weight.sum() + weight.flatten()[0];
  }
  at::Tensor weight;
};
BONFIRE_UNIT(Scale);

// From one element, of which three ranks get nothing, over sizes that nothing divides, to an empty parameter.
struct SizesImpl : torch::nn::Module {
  SizesImpl() {
    const std::vector<std::vector<std::int64_t>> shapes{{1}, {}, {3}, {257}, {5, 13}, {1, 1}, {64}, {255, 1}, {0, 4}};
    for (std::size_t at = 0; at < shapes.size(); ++at)
      scales.push_back(register_module(fmt::format("scale{}", at), Scale(shapes[at])));
    root = register_parameter("root", at::ones({}));
    initialise(*this);
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.div_(static_cast<double>(parameter.numel()));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& scale : scales) x = scale->forward(x).tanh();
    return x * root;
  }
  std::vector<Scale> scales;
  at::Tensor root;
};
BONFIRE_UNIT(Sizes);

TEST(Sizes, NeedNotDivide) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Twins<Sizes> twins(world, sharding, [] { return Sizes(); });
      for (int step = 0; step < 3; ++step)
        twins.step([&](Sizes& net, int rank) { return net->forward(chain_input(rank, step)).sin().sum(); });
      twins.expect_equal();
    }
  });
  // Three ranks, which divide nothing either: a third is rounded.
  run_ranks(3, [](World& world) {
    for (const auto what : {Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      Twins<Sizes> twins(world, {3, what}, [] { return Sizes(); });
      for (int step = 0; step < 3; ++step)
        twins.step([&](Sizes& net, int rank) { return net->forward(chain_input(rank, step)).sin().sum(); });
      twins.expect_equal();
    }
  });
}

}  // namespace
}  // namespace bonfire::scopes_test
