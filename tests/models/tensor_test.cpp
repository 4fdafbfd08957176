#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/engine.h"
#include "tests/support/ranks.h"
#include "tests/support/saved_slices.h"
#include "tests/support/thrown.h"

// Ranks that split the layers of a model train as one rank does, exchange what the plan lists, and save what it saves.
namespace bonfire::tensor_test {
namespace {
using testing::run_ranks;
using testing::SavedSlices;

constexpr std::int64_t sequence = 8, samples = 4;

struct Case {
  const char* name;
  plan::ModelSpec spec;
};

// Vocabularies that nothing divides; heads of keys that two ranks, or four, share.
const std::vector<Case>& cases() {
  using plan::ModelType;
  static const std::vector<Case> all{{"gpt2",
                                      {.type = ModelType::gpt2,
                                       .dim = 16,
                                       .layers = 2,
                                       .heads = 4,
                                       .ffn = 24,
                                       .vocab = 37,
                                       .positions = sequence + 1,
                                       .tied = true}},
                                     {"gpt2_with_dropout",
                                      {.type = ModelType::gpt2,
                                       .dim = 16,
                                       .layers = 2,
                                       .heads = 4,
                                       .ffn = 24,
                                       .vocab = 37,
                                       .positions = sequence,
                                       .dropout = 0.3}},
                                     {"llama",
                                      {.type = ModelType::llama,
                                       .dim = 16,
                                       .layers = 2,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = 6,
                                       .ffn = 20,
                                       .vocab = 37,
                                       .positions = sequence}},
                                     {"llama_of_one_key",
                                      {.type = ModelType::llama,
                                       .dim = 12,
                                       .layers = 1,
                                       .heads = 4,
                                       .kv_heads = 1,
                                       .head_dim = 8,
                                       .ffn = 12,
                                       .vocab = 33,
                                       .positions = sequence,
                                       .tied = true}}};
  return all;
}

struct Layout {
  int tensor = 1;
  bool sequence = false;
  int shard = 1;
  Sharded what = Sharded::none;
  int replicate = 1;
  bool unit_by_unit = false;  // sharded while it is built

  int ranks() const { return tensor * shard * replicate; }
  std::string words() const {
    return fmt::format("tensor {}{}, {} x {} {}", tensor, sequence ? " with sequences" : "", replicate, shard,
                       plan::name_of(what));
  }
};

at::Tensor tokens(const plan::ModelSpec& spec, int step, std::int64_t first, std::int64_t count) {
  const auto all = at::arange(samples * (sequence + 1)).mul(7 + 2 * step).add(5 * step).remainder(spec.vocab);
  return all.view({samples, sequence + 1}).narrow(0, first, count);
}

struct Outcome {
  std::vector<double> losses, norms;
  SavedSlices saved;
};

struct Training {
  plan::ModelSpec spec;
  Layout layout;
  int steps = 3, first_step = 0;
  std::function<bool(const std::string&)> frozen{};
  const SavedSlices* from = nullptr;
  bool check_collectives = false;
};

ShardOptions options_of(const plan::ModelDescription& model, const Layout& layout) {
  ShardOptions options{.what = layout.what, .start = Start::check, .buckets = {4096, 512}};
  if (layout.tensor == 1) return options;
  options.placement = [model](const std::string& name, const at::Tensor&) -> plan::Placement {
    for (const auto& unit : model.units)
      for (const auto& parameter : unit.parameters)
        if ((name == parameter.name || name == unit.name + "." + parameter.name) && !parameter.boxes.empty())
          return plan::placement_in(model, parameter);
    return {};
  };
  return options;
}

std::vector<std::string> sorted(const std::vector<Collective>& list) {
  std::vector<std::string> words;
  for (const auto& one : list) words.push_back(to_string(one));
  std::sort(words.begin(), words.end());
  return words;
}

std::vector<std::string> planned(const plan::ModelDescription& model, const Training& run) {
  const auto& layout = run.layout;
  plan::DataParallel how{.replicate = layout.replicate,
                         .shard = layout.shard,
                         .what = layout.what,
                         .microbatches = 2,
                         .tokens = samples / 2 / layout.replicate / layout.shard * sequence,
                         .compute = plan::Dtype::fp64,
                         .master = plan::Dtype::fp64,
                         .gradient = plan::Dtype::fp64,
                         .reduction = plan::Dtype::fp64,
                         .buckets = {4096, 512},
                         .clip = true};
  return sorted(plan::collectives_of_step(model, how));
}

void train(World& world, const Training& run, Outcome& outcome, std::mutex& mutex) {
  const auto& layout = run.layout;
  const Mesh mesh = world.mesh({.replicate = layout.replicate, .shard = layout.shard, .tensor = layout.tensor});
  auto description =
      plan::describe(run.spec, {.rank = mesh.coordinate(Axis::tensor), .ranks = layout.tensor, .sequence = layout.sequence});
  if (run.frozen)
    for (auto& unit : description.units)
      for (auto& parameter : unit.parameters)
        parameter.trained = !run.frozen(unit.name.empty() ? parameter.name : unit.name + "." + parameter.name);
  const auto options = options_of(description, layout);
  std::shared_ptr<Model> model;
  {
    std::optional<Build> building;
    if (layout.unit_by_unit) building.emplace(mesh, options);
    model = build_model(
        description,
        {.seed = 3, .dtype = at::kDouble, .tensor = {.group = mesh.group(Axis::tensor), .sequence = layout.sequence}});
  }
  Engine engine = shard(mesh, *model, options);
  Sgd optimizer(engine, {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01});
  if (run.from) {
    run.from->load(engine.slices());
    engine.slices_written();
    run.from->load(optimizer.slices());
    optimizer.slices_written();
  }
  const int ranks = layout.replicate * layout.shard;
  const std::int64_t part = samples / 2 / ranks;
  for (int step = run.first_step; step < run.first_step + run.steps; ++step) {
    const bool recorded = run.check_collectives && step == run.first_step + 2;
    if (recorded) world.recorder().clear(), world.recorder().start();
    double sum = 0;
    for (int micro = 0; micro < 2; ++micro) {
      const std::int64_t first = (2 * mesh.coordinate(Axis::data) + micro) * part;
      const auto sample = tokens(run.spec, step, first, part);
      model->set_dropout(static_cast<std::uint64_t>(step), first);
      const auto loss = model->loss(sample.narrow(1, 0, sequence), sample.narrow(1, 1, sequence)) / 2;
      sum += loss.item<double>();
      micro == 0 ? engine.accumulate(loss) : engine.backward(loss);
    }
    auto mean = at::full({1}, sum, at::kDouble);
    mesh.group(Axis::data).all_reduce(mean).wait();
    const auto result = optimizer.step({.clip = 0.05});
    if (recorded) {
      world.recorder().stop();
      EXPECT_EQ(sorted(world.recorder().collectives()), planned(description, run)) << layout.words();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) {
      outcome.losses.push_back(mean.item<double>() / ranks);
      outcome.norms.push_back(result.gradient_norm);
    }
  }
  engine.check_equal();
  auto slices = engine.slices(), states = optimizer.slices();
  outcome.saved.add(slices);
  outcome.saved.add(states);
  world.group().barrier().wait();
  outcome.saved.check(slices);
  outcome.saved.check(states);
}

void train(const Training& run, Outcome& outcome) {
  std::mutex mutex;
  run_ranks(run.layout.ranks(), [&](World& world) { train(world, run, outcome, mutex); });
}

void expect_same(const Outcome& seen, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(seen.losses.size(), expected.losses.size()) << what;
  for (std::size_t step = 0; step < seen.losses.size(); ++step) {
    EXPECT_NEAR(seen.losses[step], expected.losses[step], 1e-12 * expected.losses[step]) << what << ", step " << step;
    EXPECT_NEAR(seen.norms[step], expected.norms[step], 1e-12 * expected.norms[step]) << what << ", step " << step;
  }
  for (const char* kind : {"value", "momentum"}) {
    const auto names = expected.saved.names(kind);
    EXPECT_FALSE(names.empty());
    EXPECT_EQ(seen.saved.names(kind), names) << what;
    for (const auto& name : names) {
      const auto one = expected.saved.at(name, kind), other = seen.saved.at(name, kind);
      EXPECT_LE((other - one).norm().item<double>(), 1e-12 * one.norm().item<double>() + 1e-14)
          << what << ": " << name << " " << kind;
    }
  }
}

class SplitLayers : public ::testing::TestWithParam<Case> {};

TEST_P(SplitLayers, TrainAsOneRankDoes) {
  const auto& spec = GetParam().spec;
  Outcome expected;
  train({.spec = spec, .layout = {}}, expected);
  for (const int ranks : {2, 4})
    for (const bool along_sequence : {false, true}) {
      const Training run{.spec = spec, .layout = {.tensor = ranks, .sequence = along_sequence}, .check_collectives = true};
      Outcome outcome;
      train(run, outcome);
      expect_same(outcome, expected, run.layout.words());
    }
}

TEST_P(SplitLayers, AreShardedToo) {
  const auto& spec = GetParam().spec;
  Outcome expected;
  train({.spec = spec, .layout = {}}, expected);
  for (const Layout& layout :
       {Layout{.tensor = 2, .sequence = true, .replicate = 2},
        {.tensor = 2, .shard = 2, .what = Sharded::optimizer},
        {.tensor = 2, .sequence = true, .shard = 2, .what = Sharded::gradients},
        {.tensor = 2, .sequence = true, .shard = 2, .what = Sharded::parameters, .unit_by_unit = GetParam().spec.tied},
        {.tensor = 2, .shard = 2, .what = Sharded::parameters, .unit_by_unit = !GetParam().spec.tied}}) {
    Outcome outcome;
    train({.spec = spec, .layout = layout, .check_collectives = true}, outcome);
    expect_same(outcome, expected, layout.words());
  }
}

TEST_P(SplitLayers, GoOnFromWhatAnotherLayoutSaved) {
  const auto& spec = GetParam().spec;
  Outcome expected;
  train({.spec = spec, .layout = {}, .steps = 4}, expected);
  expected.losses.erase(expected.losses.begin(), expected.losses.begin() + 2);
  expected.norms.erase(expected.norms.begin(), expected.norms.begin() + 2);
  const Layout one, split{.tensor = 2, .sequence = true, .shard = 2, .what = Sharded::parameters}, four{.tensor = 4};
  for (const auto& [from, to] : {std::pair{one, split}, {split, four}, {four, one}}) {
    Outcome half, rest;
    train({.spec = spec, .layout = from, .steps = 2}, half);
    train({.spec = spec, .layout = to, .steps = 2, .first_step = 2, .from = &half.saved}, rest);
    expect_same(rest, expected, from.words() + " to " + to.words());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SplitLayers, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

bool trains(const plan::ModelSpec& spec, const std::function<bool(const std::string&)>& frozen) {
  const auto model = plan::describe(spec);
  return std::any_of(model.units.begin(), model.units.end(), [&](const auto& unit) {
    return std::any_of(unit.parameters.begin(), unit.parameters.end(), [&](const auto& parameter) {
      return !frozen(unit.name.empty() ? parameter.name : unit.name + "." + parameter.name);
    });
  });
}

// What is frozen exchanges less, exactly as the plan says.
TEST(SplitLayers, WithFrozenParametersExchangeWhatThePlanSays) {
  const auto ends_with = [](const char* end) { return [end](const std::string& name) { return name.ends_with(end); }; };
  const auto begins_with = [](std::vector<const char*> with) {
    return [with](const std::string& name) {
      return std::any_of(with.begin(), with.end(), [&](const char* one) { return name.starts_with(one); });
    };
  };
  const std::vector<std::function<bool(const std::string&)>> choices{
      ends_with(".weight"),
      ends_with(".bias"),
      begins_with({"embedding", "tokens"}),
      begins_with({"embedding", "tokens", "blocks.0"}),
      begins_with({"embedding", "tokens", "blocks.0.attention"}),
      begins_with({"embedding", "tokens", "blocks.0.attention", "blocks.0.feed_norm"}),
      begins_with({"embedding", "tokens", "blocks"}),
      begins_with({"head"})};
  for (const auto& [name, spec] : cases())
    for (std::size_t at = 0; at < choices.size(); ++at)
      for (const bool along_sequence : {false, true}) {
        if (!trains(spec, choices[at])) continue;
        SCOPED_TRACE(fmt::format("{}, choice {}", name, at));
        Outcome expected, outcome;
        train({.spec = spec, .layout = {}, .frozen = choices[at]}, expected);
        train({.spec = spec,
               .layout = {.tensor = 2, .sequence = along_sequence},
               .frozen = choices[at],
               .check_collectives = true},
              outcome);
        expect_same(outcome, expected, along_sequence ? "with sequences" : "without");
      }
}

// The same seed, whatever the layout: the parts are those of the whole.
TEST(SplitLayers, BeginAsOneRankDoes) {
  for (const auto& [name, spec] : cases())
    for (const int ranks : {2, 4}) {
      Outcome one, split;
      train({.spec = spec, .layout = {}, .steps = 0}, one);
      train({.spec = spec, .layout = {.tensor = ranks}, .steps = 0}, split);
      for (const auto& parameter : one.saved.names("value"))
        EXPECT_TRUE(split.saved.at(parameter, "value").equal(one.saved.at(parameter, "value"))) << name << " " << parameter;
    }
}

// As an evaluation, or whoever asks for logits, does.
TEST(SplitLayers, GiveWholeLogitsWithoutATarget) {
  for (const auto& [name, spec] : cases()) {
    const auto input = tokens(spec, 0, 0, samples).narrow(1, 0, sequence);
    const auto expected = build_model(spec, {.seed = 3, .dtype = at::kDouble})->forward(input);
    run_ranks(2, [&, spec = spec, name = name](World& world) {
      const TensorRanks ranks{.group = world.mesh({.tensor = 2}).group(Axis::tensor), .sequence = true};
      auto model = build_model(plan::describe(spec, {.rank = world.rank(), .ranks = 2, .sequence = true}),
                               {.seed = 3, .dtype = at::kDouble, .tensor = ranks});
      EXPECT_TRUE(at::allclose(model->forward(input), expected, 1e-12, 1e-13)) << name;
    });
  }
}

TEST(SplitLayers, RefuseWhatCannotBeSplit) {
  const auto refused = [](plan::ModelSpec spec, int ranks, const std::string& words) {
    testing::expect_part(testing::thrown<ConfigError>([&] { plan::describe(spec, {.rank = 0, .ranks = ranks}); }), words);
  };
  auto spec = cases()[0].spec;
  refused(spec, 3, "model.heads is 4, which 3 ranks do not divide");
  spec.heads = 2;
  spec.ffn = 25;
  refused(spec, 2, "model.ffn is 25, which 2 ranks do not divide");
  auto llama = cases()[2].spec;
  llama.heads = 12;
  llama.kv_heads = 4;
  llama.ffn = 24;
  refused(llama, 6, "model.kv_heads is 4: 6 ranks neither divide it nor are a multiple of it");
  llama.heads = llama.kv_heads = 4;
  llama.vocab = 3;
  refused(llama, 4, "model.vocab is 3, fewer rows than 4 ranks");
  refused({.type = plan::ModelType::mlp}, 2, "model.type is \"mlp\", whose layers are not split over 2 ranks");
}

TEST(SplitLayers, MustBeginEqualWhereTheyAreWhole) {
  testing::expect_part(testing::thrown<Error>([] {
                         run_ranks(2, [](World& world) {
                           const auto description = plan::describe(cases()[0].spec, {.rank = world.rank(), .ranks = 2});
                           const Mesh mesh = world.mesh({.tensor = 2});
                           auto model = build_model(description, {.seed = 3, .tensor = {.group = mesh.group(Axis::tensor)}});
                           const at::NoGradGuard no_grad;
                           if (world.rank() == 1) model->named_parameters()["blocks.1.feed_norm.bias"].add_(1);
                           shard(mesh, *model, options_of(description, {.tensor = 2}));
                         });
                       }),
                       "parameter 'blocks.1.feed_norm.bias' differs between rank 0 and rank 1");
}

}  // namespace
}  // namespace bonfire::tensor_test
