// Programs that treat a sharded module as an ordinary one: each mistake is an error that names the way.
#include <functional>
#include <sstream>

#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/freed_storage.h"
#include "tests/shard/mistakes.h"
#include "tests/shard/plain.h"

namespace bonfire::freed_test {
namespace {

using testing::Block;
using testing::Chain;
using testing::chain_input;
using testing::expect_words;
using testing::gathering_shardings;
using testing::initialise;
using testing::loss_of;
using testing::message_of;
using testing::numbers;
using testing::run_ranks;
using testing::shard_chain;
using testing::Sharding;
using testing::shardings;

// Whatever reads a parameter, before the first step and between steps.
TEST(Freed, ParametersCannotBeRead) {
  const std::vector<std::string> way{"or another of the 3 sharded with it was read while its memory is freed",
                                     "Engine::full_parameters()"};
  run_ranks(testing::sharding_ranks, [&](World& world) {
    for (const Sharding& sharding : gathering_shardings()) {
      Chain net(3);
      Engine engine = shard_chain(world, sharding, net);
      Sgd optimizer(engine, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        auto& weight = net->blocks[1]->linear->weight;
        const auto x = numbers({2, 6}, 1);
        const at::NoGradGuard no_grad;
        EXPECT_FALSE(has_memory(weight));
        for (const auto& read : std::vector<std::function<void()>>{
                 [&] { weight.sum(); }, [&] { weight.clone(); }, [&] { x.mm(weight); }, [&] { x.matmul(weight.t()); },
                 [&] { weight.add_(1); },
                 [&] {
                   weight.copy_(x.new_zeros({6, 6}));
                 },
                 [&] { weight.cpu().to(at::kFloat); }, [&] { weight.data_ptr<double>(); },
                 [&] { weight[0][0].item<double>(); }, [&] { net->blocks[1]->linear->forward(x); }}) {
          const auto message = message_of(read);
          expect_words(message, way);
          expect_words(message, {"parameter 'block1."});
        }
        // What is known of it without its memory stays known.
        EXPECT_EQ(weight.sizes().vec(), (std::vector<std::int64_t>{6, 6}));
        EXPECT_EQ(weight.t().scalar_type(), at::kDouble);
        {
          const auto whole = engine.full_parameters();
          EXPECT_TRUE(has_memory(weight));
          weight.sum();
        }
        const at::AutoGradMode with_grad(true);
        engine.backward(loss_of(net, step));
        optimizer.step();
      }
    }
  });
}

// Law: what torch::save writes is the model, or an error.
TEST(Freed, AModuleIsSavedWholeOrNotAtAll) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Chain net(3);
      Engine engine = shard_chain(world, sharding, net);
      Sgd optimizer(engine, {.lr = 0.1});
      engine.backward(loss_of(net));
      optimizer.step();
      const auto save_all = [&] {
        std::ostringstream file;
        torch::save(net, file);
        return file.str();
      };
      const auto save_list = [&] {
        std::ostringstream file;
        torch::save(net->parameters(), file);
        return file.str();
      };
      if (engine.factors().parameters > 1)
        for (const auto& message : {message_of(save_all), message_of(save_list)})
          expect_words(message, {"was read while its memory is freed", "saved, only inside Engine::full_parameters()"});
      const auto whole = engine.full_parameters();
      Chain other(3);
      {
        const at::NoGradGuard no_grad;
        for (auto& parameter : other->parameters()) parameter.zero_();
      }
      std::istringstream file(save_all());
      torch::load(other, file);
      const auto mine = net->parameters(), theirs = other->parameters();
      for (std::size_t at = 0; at < mine.size(); ++at) EXPECT_TRUE(at::equal(mine[at], theirs[at])) << sharding.name();
    }
  });
}

TEST(Freed, AModuleIsMovedAndConvertedBeforeItIsSharded) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      Chain net(3);
      Engine engine = shard_chain(world, sharding, net);
      net->to(at::Device(at::kCPU));  // is there already
      engine.backward(loss_of(net));
      engine.spend_gradients();
      if (engine.factors().parameters > 1) {
        expect_words(message_of([&] { net->to(at::kFloat); }),
                     {"was read while its memory is freed", "to() before shard()"});
        continue;
      }
      net->to(at::kFloat);
      expect_words(message_of([&] {
                     engine.backward(net->forward(chain_input(0, 0).to(at::kFloat), {0, 1, 2}).pow(2).mean());
                   }),
                   {"was given another shape, dtype or memory after shard(), by to()", "it is Float [", "and was Double ["});
    }
  });
}

// Parameters have no gradients where ranks hold shares of these, and optimizers of torch's skip parameters without any.
TEST(Freed, AnOptimizerOfTorchsIsNoticed) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      std::string said;
      const Log log([&](LogLevel, std::string_view words) { said += words; });
      {
        Chain net(3);
        Engine engine = shard_chain(world, sharding, net, {.log = log});
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        const auto step = [&] {
          const auto loss = loss_of(net);
          optimizer.zero_grad();
          engine.backward(loss);
          optimizer.step();
          return loss.item<double>();
        };
        const double first = step();
        if (sharding.what == Sharded::none)
          EXPECT_LT(step(), first);
        else
          expect_words(message_of(step), {"before the gradients of the first were used", "torch::optim finds no gradients"});
        EXPECT_EQ(said, "");
      }
      if (sharding.what == Sharded::none || world.rank() > 0)
        EXPECT_EQ(said, "");
      else
        expect_words(said, {"the gradients of the last Engine::backward were not used", "torch::optim finds no gradients"});
    }
  });
}

// A program that never calls backward, only accumulate.
TEST(TorchOptimizers, AfterAccumulateAloneTrainNothing) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : shardings()) {
      std::string said;
      {
        Chain net(3);
        Engine engine =
            shard_chain(world, sharding, net, {.log = Log([&](LogLevel, std::string_view words) { said += words; })});
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        const double first = loss_of(net).item<double>();
        engine.accumulate(loss_of(net));
        for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
        optimizer.step();
        EXPECT_EQ(loss_of(net).item<double>(), first);
        engine.accumulate(loss_of(net));
        EXPECT_EQ(said, "");
      }
      if (world.rank() > 0)
        EXPECT_EQ(said, "");
      else
        expect_words(said,
                     {"the gradients of the last Engine::accumulate were not used", "call Engine::backward for the last"});
    }
  });
}

// Copies that forward reads, rounded: whoever writes to them changes nothing that is trained.
TEST(TorchOptimizers, DoNotTrainRoundedCopies) {
  run_ranks(2, [](World& world) {
    for (const int shard_ranks : {1, 2}) {
      Chain net(3);
      initialise(*net, at::kFloat);
      Engine engine = shard(world.mesh({.replicate = 2 / shard_ranks, .shard = shard_ranks}), net,
                            {.what = shard_ranks > 1 ? Sharded::optimizer : Sharded::none,
                             .precision = {.parameters = at::kBFloat16},
                             .log = Log::silent()});
      Sgd ours(engine, {.lr = 0.1});
      const auto loss = [&] { return net->forward(chain_input(0, 0).to(at::kFloat), {0, 1, 2}).pow(2).mean(); };
      const auto values = [&] {
        const auto whole = engine.full_parameters();
        return net->head->weight.detach().clone();
      };
      // Ours, and changes that are announced.
      for (int step = 0; step < 2; ++step) {
        engine.backward(loss());
        ours.step();
        const auto before = values();
        {
          const auto whole = engine.full_parameters(/*write=*/true);
          const at::NoGradGuard no_grad;
          net->head->weight.mul_(0.5);
        }
        EXPECT_TRUE(values().equal(before * 0.5));
      }
      engine.backward(loss());
      {
        const at::NoGradGuard no_grad;
        net->head->weight.sub_(0.5);  // as torch::optim does
      }
      engine.spend_gradients();
      expect_words(message_of([&] { engine.backward(loss()); }),
                   {"parameter 'head.weight' was written to: forward uses a BFloat16 copy; your write did not reach the "
                    "Float master weights",
                    "in place of torch::optim", "Engine::full_parameters"});
    }
  });
}

// Blocks that nobody has marked.
struct WideImpl : torch::nn::Module {
  WideImpl()
      : first(register_module("first", torch::nn::Linear(6, 64))), last(register_module("last", torch::nn::Linear(64, 6))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last->forward(first->forward(x).tanh()); }
  torch::nn::Linear first, last;
};
BONFIRE_UNIT(Wide);

struct OuterImpl : torch::nn::Module {
  OuterImpl() : first(register_module("first", Wide())), last(register_module("last", Wide())) {}
  at::Tensor forward(const at::Tensor& x) { return last->forward(first->forward(x)); }
  Wide first, last;
};
BONFIRE_UNIT(Outer);

// Its ends are marked, its middle is not.
struct MiddleImpl : torch::nn::Module {
  MiddleImpl()
      : begin(register_module("begin", Block(6))),
        first(register_module("first", torch::nn::Linear(6, 64))),
        last(register_module("last", torch::nn::Linear(64, 6))) {
    initialise(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last->forward(first->forward(begin->forward(x)).tanh()); }
  Block begin;
  torch::nn::Linear first, last;
};
BONFIRE_UNIT(Middle);

TEST(Unmarked, BlocksMakeTheWholeModelOneUnit) {
  run_ranks(2, [](World& world) {
    const Mesh shards = world.mesh({.shard = 2});
    const auto said = [&](const Mesh& mesh, auto net, ShardOptions options) {
      std::string words;
      options.log = Log([&](LogLevel, std::string_view more) { words += more; });
      shard(mesh, net, options);
      return words;
    };
    const auto words = said(shards, Wide(), {.what = Sharded::parameters});
    // (6 * 64 + 64 + 64 * 6 + 6) * 8 bytes.
    if (world.rank() == 0)
      expect_words(words,
                   {"the whole model (Wide) is one Unit", "all of its 6.55 KiB of parameters", "BONFIRE_UNIT(Block)"});
    else
      EXPECT_EQ(words, "");
    const auto of_middle = said(shards, Middle(), {.what = Sharded::parameters});
    if (world.rank() == 0)
      expect_words(of_middle,
                   {"6.55 KiB of the model's", "outside of any Unit but the root (Middle)", "BONFIRE_UNIT(Block)"});
    EXPECT_EQ(said(shards, Wide(), {.what = Sharded::gradients}), "");
    EXPECT_EQ(said(shards, Wide(), {.what = Sharded::parameters, .wrapping = {.all_in_one = true}}), "");
    EXPECT_EQ(said(shards, Outer(), {.what = Sharded::parameters}), "");
    EXPECT_EQ(said(shards, Block(6), {.what = Sharded::parameters}), "");
    EXPECT_EQ(said(world.mesh({.replicate = 2}), Wide(), {}), "");
  });
}

}  // namespace
}  // namespace bonfire::freed_test
