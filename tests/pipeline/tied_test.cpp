// Weights that are tied over stages: each copy gets the sum of its own weight's gradients, in whatever order modules have
// them, and what cannot be tied is refused on all ranks when the pipeline is made.
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"
#include "tests/pipeline/skip_chain.h"
#include "tests/support/ranks.h"

namespace bonfire::tied_test {
namespace {

using testing::numbers;
using testing::run_ranks;

constexpr std::int64_t width = 6, narrow = 4;
constexpr double rate = 0.1;

// Two weights that all Units have, in one order of registration or in the other.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(bool narrow_first) {
    for (const bool wide : {!narrow_first, narrow_first})
      wide ? a = register_parameter("a", numbers({width, width}, 3))
           : b = register_parameter("b", numbers({narrow, width}, 50));
  }
  at::Tensor a, b;
};

at::Tensor first_half(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b) {
  return x.matmul(a).tanh() + x.matmul(b.t()).matmul(b).mul(0.3);
}
at::Tensor second_half(const at::Tensor& x, const at::Tensor& a, const at::Tensor& b, const at::Tensor& target) {
  return (x.matmul(b.t()).sin().matmul(b).matmul(a) - target).pow(2).mean();
}

using Change = std::function<void(int unit, PairImpl& pair)>;

// Two Units that share both weights. `change`: makes of a Unit what the test is about.
Chain pair_chain(bool opposite, const Change& change = {}) {
  Chain chain{.units = {"u0", "u1"}};
  chain.build = [=](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<std::shared_ptr<PairImpl>> pairs;
    for (int unit = range.begin; unit < range.end; ++unit) {
      pairs.push_back(root->register_module(fmt::format("u{}", unit), std::make_shared<PairImpl>(opposite && unit == 1)));
      if (change) change(unit, *pairs.back());
    }
    return StageModule{root, [pairs, range](Tensors values, const Microbatch& microbatch) {
                         auto x = values[0];
                         if (range.begin == 0) x = first_half(x, pairs.front()->a, pairs.front()->b);
                         if (range.end == 2) x = second_half(x, pairs.back()->a, pairs.back()->b, microbatch.target[0]);
                         return Tensors{x};
                       }};
  };
  chain.tied = {{{{0, "u0.a"}, {1, "u1.a"}}}, {{{0, "u0.b"}, {1, "u1.b"}}}};
  return chain;
}

std::vector<Microbatch> batch_of(int step, int data_rank) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < 2; ++at)
    batch.push_back(
        {.input = {numbers({3, width}, 10 * step + at + 100 * data_rank)}, .target = {numbers({3, width}, at + 5)}});
  return batch;
}

std::map<std::string, at::Tensor> train_plainly(int steps, int data_ranks) {
  auto a = numbers({width, width}, 3).requires_grad_(true), b = numbers({narrow, width}, 50).requires_grad_(true);
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < data_ranks; ++rank)
      for (const auto& microbatch : batch_of(step, rank))
        (second_half(first_half(microbatch.input[0], a, b), a, b, microbatch.target[0]) / 2 / data_ranks).backward();
    const at::NoGradGuard no_grad;
    for (auto* weight : {&a, &b}) weight->sub_(weight->grad() * rate), weight->mutable_grad().reset();
  }
  return {{"a", a.detach()}, {"b", b.detach()}};
}

PipelineOptions two_stages(const std::string& name = "1f1b") {
  return {.schedule = schedule::generate(name, {.ranks = 2, .microbatches = 2}), .schedule_name = name};
}

TEST(TiedWeights, OrderOfRegistrationDoesNotMatter) {
  constexpr int steps = 2;
  struct Way {
    MeshShape shape;
    Sharded what;
  };
  for (const auto& [shape, what] : std::vector<Way>{{{.pipeline = 2}, Sharded::none},
                                                    {{.pipeline = 2, .replicate = 2}, Sharded::none},
                                                    {{.pipeline = 2, .shard = 2}, Sharded::optimizer},
                                                    {{.pipeline = 2, .shard = 2}, Sharded::parameters}}) {
    const auto plain = train_plainly(steps, shape.along(Axis::data));
    for (const bool opposite : {false, true})
      run_ranks(shape.size(), [&](World& world) {
        const Mesh mesh = world.mesh(shape);
        auto options = two_stages();
        options.shard.what = what;
        Pipeline pipeline(mesh, pair_chain(opposite), options);
        const int stage = pipeline.local_stages().front();
        Sgd sgd(pipeline.engine(stage), {.lr = rate});
        for (int step = 0; step < steps; ++step) {
          pipeline.step(batch_of(step, mesh.coordinate(Axis::data)));
          sgd.step();
        }
        const auto whole = pipeline.engine(stage).full_parameters();
        for (const auto& item : pipeline.module(stage).named_parameters())
          EXPECT_LT((item.value() - plain.at(item.key().substr(3))).abs().max().item<double>(), 1e-14)
              << item.key() << (opposite ? ", opposite order, " : ", same order, ") << plan::name_of(what);
      });
  }
}

// All ranks say the same.
void expect_refused(const Chain& chain, const std::string& words, PipelineOptions options = two_stages()) {
  std::vector<std::string> said(2);
  run_ranks(2, [&](World& world) {
    try {
      Pipeline pipeline(world.mesh({.pipeline = 2}), chain, options);
    } catch (const ConfigError& error) {
      said[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  for (const auto& each : said) EXPECT_EQ(each, words);
}

TEST(TiedWeights, ThatAreNotAlikeAreRefused) {
  const auto with_b = [](const std::function<void(at::Tensor&)>& change) {
    return pair_chain(true, [=](int unit, PairImpl& pair) {
      if (unit == 1) change(pair.b);
    });
  };
  expect_refused(with_b([](at::Tensor& b) {
                   b.set_data(numbers({narrow - 1, width}, 0));
                 }),
                 "'u1.b' of stage 1 is Double [3, 6], trained; 'u0.b' of stage 0, to which it is tied, is Double [4, 6], "
                 "trained: they must be alike");
  // As many numbers, in another shape.
  expect_refused(with_b([](at::Tensor& b) {
                   b.set_data(numbers({width, narrow}, 0));
                 }),
                 "'u1.b' of stage 1 is Double [6, 4], trained; 'u0.b' of stage 0, to which it is tied, is Double [4, 6], "
                 "trained: they must be alike");
  expect_refused(with_b([](at::Tensor& b) { b.set_data(b.detach().to(at::kFloat)); }),
                 "'u1.b' of stage 1 is Float [4, 6], trained; 'u0.b' of stage 0, to which it is tied, is Double [4, 6], "
                 "trained: they must be alike");
  expect_refused(with_b([](at::Tensor& b) { b.set_requires_grad(false); }),
                 "'u1.b' of stage 1 is Double [4, 6], frozen; 'u0.b' of stage 0, to which it is tied, is Double [4, 6], "
                 "trained: they must be alike");
}

TEST(TiedWeights, ThatAreReadInDifferentFormatsAreRefused) {
  auto options = two_stages();
  options.shard.precision.parameters = at::kBFloat16;
  // One of two.
  options.shard.precision.keep = [](const std::string& name, const at::Tensor&) { return name == "u0.a"; };
  expect_refused(pair_chain(false),
                 "the tied weight 'u1.a' of stage 1 is not read in the same number format as 'u0.a' of stage 0: let "
                 "precision.keep and precision.scales answer alike for both",
                 options);
}

TEST(TiedWeights, ThatAreNotThereOrTiedTwiceAreRefused) {
  auto unknown = pair_chain(false);
  unknown.tied[1].uses[1].parameter = "u1.c";
  expect_refused(unknown, "stage 1 has no parameter 'u1.c', which Chain::tied names of Unit 1");
  auto beyond = pair_chain(false);
  beyond.tied[1].uses[1].unit = 2;
  expect_refused(beyond, "Chain::tied names Unit 2; the model has 2");
  auto twice = pair_chain(false);
  twice.tied[1].uses[0] = {0, "u0.a"};
  expect_refused(twice, "Chain::tied names 'u0.a' of Unit 0 twice: list all uses of one weight together, each once");
}

// Between steps: on all stages together, or all ranks hear of it and nothing has happened.
TEST(TiedWeights, AreFrozenOnAllTheirStages) {
  struct Way {
    int ranks, chunks;
    const char* schedule;
  };
  for (const auto& [ranks, chunks, name] : std::vector<Way>{{2, 1, "1f1b"}, {1, 2, "interleaved"}}) {
    const auto table = schedule::generate(name, {.ranks = ranks, .microbatches = 2, .chunks = chunks});
    std::vector<std::string> said(static_cast<std::size_t>(ranks));
    std::map<std::string, at::Tensor> before;
    std::mutex mutex;
    run_ranks(ranks, [&](World& world) {
      Pipeline pipeline(world.mesh({.pipeline = ranks}), pair_chain(true), {.schedule = table});
      std::map<int, std::unique_ptr<Sgd>> sgd;
      for (const int stage : pipeline.local_stages())
        sgd[stage] = std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate});
      const auto step = [&](int number) {
        pipeline.step(batch_of(number, 0));
        for (auto& [stage, each] : sgd) each->step();
      };
      const auto freeze = [&](int stage) {
        if (sgd.contains(stage))
          pipeline.module(stage).named_parameters()[fmt::format("u{}.b", stage)].set_requires_grad(false);
      };
      step(0);
      freeze(1);
      try {
        step(1);
      } catch (const ConfigError& error) {
        said[static_cast<std::size_t>(world.rank())] = error.what();
      }
      for (auto& [stage, each] : sgd) {
        const std::lock_guard lock(mutex);
        for (const auto& item : pipeline.module(stage).named_parameters())
          before[item.key()] = item.value().detach().clone();
      }
      freeze(0);
      step(1);
      for (auto& [stage, each] : sgd)
        for (const auto& item : pipeline.module(stage).named_parameters()) {
          const std::lock_guard lock(mutex);
          EXPECT_EQ(at::equal(item.value(), before.at(item.key())), item.key().ends_with(".b")) << item.key();
        }
    });
    for (const auto& each : said)
      EXPECT_EQ(each,
                "'u1.b' of stage 1 is Double [4, 6], frozen; 'u0.b' of stage 0, to which it is tied, is Double [4, 6], "
                "trained: they must be alike");
    const auto plain = train_plainly(1, 1);
    for (const auto& [name_of, value] : before)
      EXPECT_LT((value - plain.at(name_of.substr(3))).abs().max().item<double>(), 1e-14) << name_of;
  }
}

// Four Units in a row: the first two share a weight, and the second shares another with the last.
Chain crossing_chain() {
  Chain chain{.units = {"u0", "u1", "u2", "u3"}};
  chain.build = [](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<std::shared_ptr<PairImpl>> pairs;
    for (int unit = range.begin; unit < range.end; ++unit)
      pairs.push_back(root->register_module(fmt::format("u{}", unit), std::make_shared<PairImpl>(false)));
    return StageModule{root, [pairs, range](Tensors values, const Microbatch& microbatch) {
                         auto x = values[0];
                         for (const auto& pair : pairs) x = first_half(x, pair->a, pair->b);
                         return Tensors{range.end == 4 ? (x - microbatch.target[0]).pow(2).mean() : x};
                       }};
  };
  chain.tied = {{{{0, "u0.a"}, {1, "u1.a"}}}, {{{1, "u1.b"}, {3, "u3.b"}}}};
  return chain;
}

// Ranks come to the sums of two weights in opposite orders: the first updates its last stage early.
TEST(TiedWeights, OfDifferentStagesDoNotWaitForEachOther) {
  const auto batch = std::vector<Microbatch>{{.input = {numbers({3, width}, 1)}, .target = {numbers({3, width}, 2)}}};
  std::map<std::string, at::Tensor> weights;
  for (int unit = 0; unit < 4; ++unit) {
    weights[fmt::format("u{}.a", unit)] = numbers({width, width}, 3).requires_grad_(true);
    weights[fmt::format("u{}.b", unit)] = numbers({narrow, width}, 50).requires_grad_(true);
  }
  weights["u1.a"] = weights["u0.a"];
  weights["u3.b"] = weights["u1.b"];
  auto x = batch[0].input[0];
  for (int unit = 0; unit < 4; ++unit)
    x = first_half(x, weights[fmt::format("u{}.a", unit)], weights[fmt::format("u{}.b", unit)]);
  (x - batch[0].target[0]).pow(2).mean().backward();
  const auto table = schedule::parse_table("0F0 3F0 3B0 3U 0B0 0U\n1F0 2F0 2B0 1B0 1U 2U", "mine.txt");
  run_ranks(2, [&](World& world) {
    Pipeline pipeline(world.mesh({.pipeline = 2}), crossing_chain(), {.schedule = table, .schedule_name = "mine.txt"});
    std::map<int, std::unique_ptr<Sgd>> sgd;
    for (const int stage : pipeline.local_stages())
      sgd[stage] = std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate});
    pipeline.step(batch, {.update = [&](int stage) { sgd.at(stage)->step(); }});
    for (const int stage : pipeline.local_stages())
      for (const auto& item : pipeline.module(stage).named_parameters()) {
        const auto& weight = weights.at(item.key());
        EXPECT_LT((item.value() - (weight - rate * weight.grad())).abs().max().item<double>(), 1e-14) << item.key();
      }
  });
}

TEST(TiedWeights, OfOneStageMustBeOneTensor) {
  auto chain = pair_chain(false);
  run_ranks(1, [&](World& world) {
    const auto table = schedule::generate("gpipe", {.ranks = 1, .microbatches = 2});
    try {
      Pipeline pipeline(world.mesh({}), chain, {.schedule = table});
      FAIL();
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(),
                   "stage 0: 'u0.a' and 'u1.a' are tied, and are two tensors; both Units must hold the same one");
    }
  });
}

// Ties that a table has itself are those of the model.
TEST(TiedWeights, OfATableAreTheModels) {
  const auto refusal = [](const std::string& text, const Chain& chain) -> std::string {
    try {
      pipeline_table(chain, {.schedule = schedule::parse_table(text, "mine.txt"), .schedule_name = "mine.txt"}, {});
      return "";
    } catch (const schedule::ScheduleError& error) {
      return error.what();
    }
  };
  const auto chain = pair_chain(false);
  auto untied = chain;
  untied.tied.clear();
  EXPECT_EQ(refusal("0F0 0B0 0TIE0 0U\n1F0 1B0 1TIE0 1U", chain), "");
  EXPECT_TRUE(refusal("0F0 0B0 0TIE0 0U\n1F0 1B0 1TIE0 1U", untied)
                  .ends_with("'0TIE0': no weights of the model are tied over several stages"));
  EXPECT_TRUE(refusal("0F0 0B0 0TIE1 0U\n1F0 1B0 1TIE1 1U", chain)
                  .ends_with("'0TIE1': the last group of stages with tied weights is TIE0"));
}

}  // namespace
}  // namespace bonfire::tied_test
