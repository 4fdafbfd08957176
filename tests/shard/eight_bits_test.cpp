// Weights that are kept and gathered in eight bits: however ranks divide them, products read the same bits, and what travels
// is what the plan says.
#include <algorithm>
#include <map>
#include <optional>

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/models/precision.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/share.h"
#include "tests/shard/twins.h"
#include "tests/support/tiny_training.h"

namespace bonfire::eight_bits_test {
namespace {

using testing::run_ranks;
using testing::Sharding;
using testing::shardings;

constexpr int steps = 3;

struct Training {
  plan::ModelSpec spec;
  Fp8Recipe recipe{};
  int accumulation = 1;
  std::int64_t samples = 4;  // of a microbatch
  bool whole_sums = false;   // gradients are kept whole over the microbatches
  bool frozen = false;       // every second parameter
  bool in_scope = false;     // built in a build scope
};

std::int64_t scales_of(const Training& training, const std::string& name, at::IntArrayRef shape) {
  const bool product = name.find("attention.") != std::string::npos || name.find("feed.") != std::string::npos;
  if (!product || shape.size() != 2 || shape[0] % 16 || shape[1] % 16) return 0;
  return training.recipe.scales == Fp8Scales::row ? shape[0] : 1;
}

ShardOptions options_for(const Training& training, const Sharding& sharding) {
  return sharding.options(
      {.precision = {.parameters = at::kBFloat16,
                     .scales = [=](const std::string& name,
                                   const at::Tensor& parameter) { return scales_of(training, name, parameter.sizes()); }},
       // Microbatches are added up before ranks are, as where nothing is divided.
       .accumulation = training.whole_sums ? Accumulation::full : Accumulation::sharded,
       .log = Log::silent()});
}

struct Outcome {
  std::vector<double> losses;           // of this rank
  std::vector<at::Tensor> masters;      // whole
  std::vector<Collective> collectives;  // of the last step
};

// What is gathered is what the whole master is rounded to.
void expect_masters_rounded(Engine& engine, const std::map<std::string, at::Tensor>& masters, const Sharding& sharding) {
  const auto whole = engine.full_parameters();
  for (const auto& flat : engine.flats()) {
    const auto& layout = flat->layout();
    for (std::size_t at = 0; at < layout.segments.size(); ++at) {
      const auto& segment = layout.segments[at];
      if (segment.scales == 0) continue;
      const auto& gathered = flat->parameters()[at];
      ASSERT_EQ(gathered.scalar_type(), at::kFloat8_e4m3fn);
      const WeightPart master{.elements = masters.at(segment.name), .each = segment.elements / segment.scales};
      const auto magnitudes = at::zeros({segment.scales}), expected = at::empty({segment.elements}, at::kFloat8_e4m3fn);
      note_magnitudes(magnitudes, master);
      round_scaled(expected, master, magnitudes);
      EXPECT_TRUE(at::equal(gathered.detach().view(at::kByte).view(-1), expected.view(at::kByte)))
          << segment.name << ", " << sharding.name();
      EXPECT_TRUE(at::equal(flat->codec().inverse(at), inverse_scales(magnitudes)))
          << segment.name << ", " << sharding.name();
    }
  }
}

Outcome train(const World& world, const Sharding& sharding, const Training& training) {
  const Mesh mesh = world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor});
  std::shared_ptr<Model> model;
  {
    std::optional<Build> scope;
    if (training.in_scope) scope.emplace(mesh, options_for(training, sharding));
    model = build_model(training.spec, {.seed = 5, .dtype = at::kFloat});
  }
  use_fp8(*model, training.recipe);
  bool even = true;
  for (auto& parameter : model->parameters())
    if ((even = !even) && training.frozen) parameter.set_requires_grad(false);
  Engine engine = shard(mesh, *model, options_for(training, sharding));
  AdamW optimizer(engine, {.lr = 0.02});
  Outcome outcome;
  for (int step = 0; step < steps; ++step) {
    if (step + 1 == steps) {
      world.recorder().clear();
      world.recorder().start();
    }
    for (int micro = 0; micro < training.accumulation; ++micro) {
      const auto first = (world.rank() * training.accumulation + micro) * training.samples;
      auto [input, target] = testing::tiny_data(training.spec, step, first, training.samples);
      const auto loss = model->loss(input, target);
      outcome.losses.push_back(loss.item<double>());
      micro + 1 < training.accumulation ? engine.accumulate(loss) : engine.backward(loss);
    }
    optimizer.step();
  }
  outcome.collectives = world.recorder().collectives();
  world.recorder().stop();
  engine.check_equal();
  std::map<std::string, at::Tensor> by_name;
  for (const auto& flat : engine.flats())
    for (const auto& share : flat->trained()) {
      const auto whole = whole_region(mesh.group(Axis::shard), share.master, engine.factors().optimizer);
      for (const auto& segment : flat->layout().segments)
        if (segment.region == share.region)
          by_name[segment.name] = whole.narrow(0, segment.offset, segment.elements).clone();
    }
  for (auto& [name, values] : by_name) outcome.masters.push_back(values);
  expect_masters_rounded(engine, by_name, sharding);
  return outcome;
}

// Two ranks, whose sums have no order.
const std::vector<Sharding>& halves() {
  static const std::vector<Sharding> all{{2, Sharded::optimizer},
                                         {2, Sharded::gradients},
                                         {2, Sharded::parameters, true, 0},
                                         {2, Sharded::parameters, true, 2},
                                         {2, Sharded::parameters, false, 1}};
  return all;
}

void expect_same_bits(const World& world, const Training& training) {
  const auto expected = train(world, {1, Sharded::none}, training);
  for (const Sharding& sharding : halves()) {
    const auto outcome = train(world, sharding, training);
    EXPECT_EQ(outcome.losses, expected.losses) << sharding.name();
    ASSERT_EQ(outcome.masters.size(), expected.masters.size()) << sharding.name();
    for (std::size_t at = 0; at < expected.masters.size(); ++at)
      EXPECT_TRUE(at::equal(outcome.masters[at], expected.masters[at])) << sharding.name() << ", " << at;
  }
}

const plan::ModelSpec& gpt2() { return testing::tiny_models()[2].spec; }
const plan::ModelSpec& llama() { return testing::tiny_models()[3].spec; }

TEST(EightBits, HoweverDividedTheBitsAreThoseOfWholeWeights) {
  run_ranks(2, [](World& world) {
    for (const auto scales : {Fp8Scales::tensor, Fp8Scales::row})
      for (const auto& spec : {gpt2(), llama()}) expect_same_bits(world, {.spec = spec, .recipe = {.scales = scales}});
  });
}

TEST(EightBits, AlsoOverMicrobatchesAndWithFrozenWeights) {
  run_ranks(2, [&](World& world) {
    for (const auto scales : {Fp8Scales::tensor, Fp8Scales::row}) {
      const Fp8Recipe recipe{.scaling = Fp8Scaling::current, .scales = scales};
      expect_same_bits(world, {.spec = llama(), .recipe = recipe, .accumulation = 3, .whole_sums = true});
      expect_same_bits(world, {.spec = llama(), .recipe = recipe, .frozen = true});
      expect_same_bits(world, {.spec = llama(), .recipe = recipe, .in_scope = true});
      // Too few rows for a product in fp8: the weight is what it stands for, and the product is made without.
      expect_same_bits(world, {.spec = llama(), .recipe = recipe, .samples = 1});
    }
  });
}

// The second law, and what it says about these weights: a byte for each, where bf16 moves two.
TEST(EightBits, MoveWhatThePlanSays) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const auto scales : {Fp8Scales::tensor, Fp8Scales::row})
      for (const Sharding& sharding : shardings()) {
        const Training training{.spec = gpt2(), .recipe = {.scales = scales}, .accumulation = 2};
        plan::DataParallel layout{.replicate = world.size() / sharding.factor,
                                  .shard = sharding.factor,
                                  .what = sharding.what,
                                  .microbatches = training.accumulation,
                                  .reshard_after_forward = sharding.reshard.free,
                                  .reshard_ranks = sharding.reshard.ranks,
                                  .prefetch = sharding.prefetch,
                                  .compute = plan::Dtype::bf16,
                                  .buckets = sharding.options().buckets};
        const auto model = plan::describe(gpt2());
        const auto plain = plan::bytes_moved(model, layout);
        layout.scales = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
          return scales_of(training, name, shape);
        };
        auto expected = plan::collectives_of_step(model, layout);
        // The loss, which this test does not average.
        std::erase(expected, Collective{CollectiveKind::all_reduce, Axis::data, 8});
        auto seen = train(world, sharding, training).collectives;
        std::sort(expected.begin(), expected.end());
        std::sort(seen.begin(), seen.end());
        EXPECT_EQ(seen, expected) << sharding.name();
        if (sharding.factor > 1 && sharding.reshard.ranks == 0) {
          EXPECT_LT(plan::bytes_moved(model, layout), plain) << sharding.name();
        }
      }
  });
}

TEST(EightBits, RefusesWhatItCannotDo) {
  run_ranks(2, [](World& world) {
    const Training training{.spec = gpt2()};
    const Mesh mesh = world.mesh({.shard = 2});
    const auto refused = [&](const ShardOptions& options, bool fp8, const std::string& word) {
      auto model = build_model(gpt2(), {.seed = 5, .dtype = at::kFloat});
      if (fp8) use_fp8(*model, training.recipe);
      try {
        const Engine engine = shard(mesh, *model, options);
        ADD_FAILURE() << word;
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      }
    };
    auto options = options_for(training, {2, Sharded::parameters});
    refused(options, false, "set_fp8");
    options.offload = Offload::optimizer;
    refused(options, true, "offload");
    options.offload = Offload::none;
    options.precision.scales = [](const std::string&, const at::Tensor&) { return 3; };
    refused(options, true, "3 scales");

    auto model = build_model(gpt2(), {.seed = 5, .dtype = at::kFloat});
    use_fp8(*model, training.recipe);
    Engine engine = shard(mesh, *model, options_for(training, {2, Sharded::parameters}));
    EXPECT_THROW(engine.full_parameters(true), Error);
  });
}

}  // namespace
}  // namespace bonfire::eight_bits_test
