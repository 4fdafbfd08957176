#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/data_groups.h"
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

// Ranks that share the positions of their samples train as one rank does, exchange what the plan lists, and save what it
// saves; with documents that keep to themselves too.
namespace bonfire::context_test {
namespace {
using testing::run_ranks;
using testing::SavedSlices;

constexpr std::int64_t sequence = 16, samples = 4;

struct Case {
  const char* name;
  plan::ModelSpec spec;
};

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
                                       .heads = 8,
                                       .kv_heads = 4,
                                       .head_dim = 6,
                                       .ffn = 20,
                                       .vocab = 37,
                                       .positions = sequence}}};
  return all;
}

struct Layout {
  int context = 1;
  ContextWay way = ContextWay::ring;
  int tensor = 1;
  bool sequence = false;
  int shard = 1;
  Sharded what = Sharded::none;
  int replicate = 1;

  int ranks() const { return context * tensor * shard * replicate; }
  std::string words() const {
    return fmt::format("context {} by {}, tensor {}{}, {} x {} {}", context, way == ContextWay::ring ? "ring" : "heads",
                       tensor, sequence ? " with sequences" : "", replicate, shard, plan::name_of(what));
  }
};

at::Tensor tokens(const plan::ModelSpec& spec, int step, std::int64_t first, std::int64_t count) {
  const auto all = at::arange(samples * (sequence + 1)).mul(7 + 2 * step).add(5 * step).remainder(spec.vocab);
  return all.view({samples, sequence + 1}).narrow(0, first, count);
}

// Other ones in each step.
at::Tensor documents(int step, std::int64_t first, std::int64_t count) {
  at::Tensor starts = at::zeros({samples, sequence}, at::kLong);
  for (std::int64_t sample = 0; sample < samples; ++sample)
    for (std::int64_t at = 1; at < sequence; ++at) {
      const bool begins =
          Random(static_cast<std::uint64_t>(step)).below(static_cast<std::uint64_t>(sample * sequence + at), 4) == 0;
      starts[sample][at] = begins ? at : starts[sample][at - 1].item<std::int64_t>();
    }
  return starts.narrow(0, first, count).contiguous();
}

struct Training {
  plan::ModelSpec spec;
  Layout layout{};
  bool separate = false;
  int steps = 3, first_step = 0;
  std::function<bool(const std::string&)> frozen{};
  const SavedSlices* from = nullptr;
  bool check_collectives = true;
};

struct Outcome {
  std::vector<double> losses, norms;
  std::unique_ptr<SavedSlices> saved = std::make_unique<SavedSlices>();
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

std::vector<std::string> planned(const plan::ModelDescription& model, const Layout& layout) {
  return sorted(plan::collectives_of_step(
      model, {.replicate = layout.replicate * layout.context,
              .shard = layout.shard,
              .what = layout.what,
              .microbatches = 2,
              .tokens = samples / 2 / layout.replicate / layout.shard * sequence / layout.context,
              .compute = plan::Dtype::fp64,
              .master = plan::Dtype::fp64,
              .gradient = plan::Dtype::fp64,
              .reduction = plan::Dtype::fp64,
              .buckets = {4096, 512},
              .clip = true,
              .context = {.ranks = layout.context,
                          .way = layout.way == ContextWay::ring ? plan::ContextWay::ring : plan::ContextWay::heads}}));
}

void train(World& world, const Training& run, Outcome& outcome, std::mutex& mutex) {
  const auto& layout = run.layout;
  const Mesh mesh =
      world.mesh({.replicate = layout.replicate, .shard = layout.shard, .context = layout.context, .tensor = layout.tensor});
  auto description =
      plan::describe(run.spec, {.rank = mesh.coordinate(Axis::tensor), .ranks = layout.tensor, .sequence = layout.sequence});
  if (run.frozen)
    for (auto& unit : description.units)
      for (auto& parameter : unit.parameters)
        parameter.trained = !run.frozen(unit.name.empty() ? parameter.name : unit.name + "." + parameter.name);
  const auto options = options_of(description, layout);
  const auto model = build_model(description, {.seed = 3,
                                               .dtype = at::kDouble,
                                               .tensor = {.group = mesh.group(Axis::tensor), .sequence = layout.sequence},
                                               .context = {.group = mesh.group(Axis::context), .way = layout.way}});
  Engine engine = shard(mesh, *model, options);
  Sgd optimizer(engine, {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01});
  if (run.from) {
    run.from->load(engine.slices());
    engine.slices_written();
    run.from->load(optimizer.slices());
    optimizer.slices_written();
  }
  const Group all = DataGroups(mesh).all;
  const std::int64_t part = samples / 2 / (layout.replicate * layout.shard);
  for (int step = run.first_step; step < run.first_step + run.steps; ++step) {
    const bool recorded = run.check_collectives && step == run.first_step + 2;
    if (recorded) world.recorder().clear(), world.recorder().start();
    double sum = 0;
    for (int micro = 0; micro < 2; ++micro) {
      const std::int64_t first = (2 * mesh.coordinate(Axis::data) + micro) * part;
      const auto sample = tokens(run.spec, step, first, part);
      model->set_dropout(static_cast<std::uint64_t>(step), first);
      model->set_documents(run.separate ? documents(step, first, part) : at::Tensor());
      const auto loss = model->loss(sample.narrow(1, 0, sequence), sample.narrow(1, 1, sequence)) / 2;
      sum += loss.item<double>();
      micro == 0 ? engine.accumulate(loss) : engine.backward(loss);
    }
    auto mean = at::full({1}, sum, at::kDouble);
    all.all_reduce(mean).wait();
    const auto result = optimizer.step({.clip = 0.05});
    if (recorded) {
      world.recorder().stop();
      EXPECT_EQ(sorted(world.recorder().collectives()), planned(description, layout)) << layout.words();
    }
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) {
      outcome.losses.push_back(mean.item<double>() / all.size());
      outcome.norms.push_back(result.gradient_norm);
    }
  }
  engine.check_equal();
  auto slices = engine.slices(), states = optimizer.slices();
  outcome.saved->add(slices);
  outcome.saved->add(states);
  world.group().barrier().wait();
  outcome.saved->check(slices);
  outcome.saved->check(states);
}

Outcome train(const Training& run) {
  Outcome outcome;
  std::mutex mutex;
  run_ranks(run.layout.ranks(), [&](World& world) { train(world, run, outcome, mutex); });
  return outcome;
}

void expect_same(const Outcome& seen, const Outcome& expected, const std::string& what) {
  ASSERT_EQ(seen.losses.size(), expected.losses.size()) << what;
  for (std::size_t step = 0; step < seen.losses.size(); ++step) {
    EXPECT_NEAR(seen.losses[step], expected.losses[step], 1e-12 * expected.losses[step]) << what << ", step " << step;
    EXPECT_NEAR(seen.norms[step], expected.norms[step], 1e-12 * expected.norms[step]) << what << ", step " << step;
  }
  for (const char* kind : {"value", "momentum"}) {
    const auto names = expected.saved->names(kind);
    EXPECT_FALSE(names.empty());
    EXPECT_EQ(seen.saved->names(kind), names) << what;
    for (const auto& name : names) {
      const auto one = expected.saved->at(name, kind), other = seen.saved->at(name, kind);
      EXPECT_LE((other - one).norm().item<double>(), 1e-12 * one.norm().item<double>() + 1e-14)
          << what << ": " << name << " " << kind;
    }
  }
}

class SharedSamples : public ::testing::TestWithParam<Case> {};

TEST_P(SharedSamples, TrainAsOnOneRank) {
  for (const bool separate : {false, true}) {
    const auto expected = train({.spec = GetParam().spec, .separate = separate});
    for (const int ranks : {2, 4})
      for (const auto way : {ContextWay::ring, ContextWay::heads}) {
        const Layout layout{.context = ranks, .way = way};
        expect_same(train({.spec = GetParam().spec, .layout = layout, .separate = separate}), expected,
                    layout.words() + (separate ? ", documents" : ""));
      }
  }
}

TEST_P(SharedSamples, WithEverythingElse) {
  for (const bool separate : {false, true}) {
    const auto expected = train({.spec = GetParam().spec, .separate = separate});
    for (const Layout& layout : {Layout{.context = 2, .replicate = 2},
                                 {.context = 2, .way = ContextWay::heads, .shard = 2, .what = Sharded::optimizer},
                                 {.context = 2, .shard = 2, .what = Sharded::gradients},
                                 {.context = 2, .shard = 2, .what = Sharded::parameters},
                                 {.context = 2, .tensor = 2},
                                 {.context = 2, .tensor = 2, .sequence = true},
                                 {.context = 2, .way = ContextWay::heads, .tensor = 2, .sequence = true},
                                 {.context = 2, .tensor = 2, .sequence = true, .shard = 2, .what = Sharded::parameters}})
      expect_same(train({.spec = GetParam().spec, .layout = layout, .separate = separate}), expected,
                  layout.words() + (separate ? ", documents" : ""));
  }
}

TEST_P(SharedSamples, GoOnFromWhatAnotherLayoutSaved) {
  auto expected = train({.spec = GetParam().spec, .steps = 4});
  expected.losses.erase(expected.losses.begin(), expected.losses.begin() + 2);
  expected.norms.erase(expected.norms.begin(), expected.norms.begin() + 2);
  const Layout one, shared{.context = 2, .shard = 2, .what = Sharded::parameters}, four{.context = 4};
  for (const auto& [from, to] : {std::pair{one, shared}, {shared, four}, {four, one}}) {
    const auto half = train({.spec = GetParam().spec, .layout = from, .steps = 2});
    expect_same(train({.spec = GetParam().spec, .layout = to, .steps = 2, .first_step = 2, .from = half.saved.get()}),
                expected, from.words() + " to " + to.words());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SharedSamples, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// What is frozen exchanges less, exactly as the plan says.
TEST(SharedSamples, WithFrozenParametersExchangeWhatThePlanSays) {
  const auto begins_with = [](std::vector<const char*> with) {
    return [with](const std::string& name) {
      return std::any_of(with.begin(), with.end(), [&](const char* one) { return name.starts_with(one); });
    };
  };
  for (const auto& frozen :
       {begins_with({"embedding", "tokens"}), begins_with({"embedding", "tokens", "blocks.0"}),
        begins_with({"embedding", "tokens", "blocks.0.attention"}), begins_with({"embedding", "tokens", "blocks"})})
    for (const auto& [name, spec] : cases())
      for (const auto way : {ContextWay::ring, ContextWay::heads}) {
        if (spec.tied && frozen("blocks.1")) continue;  // then all but the last norm is frozen, as for the others
        const auto expected = train({.spec = spec, .frozen = frozen});
        expect_same(train({.spec = spec, .layout = {.context = 2, .way = way}, .frozen = frozen}), expected, name);
      }
}

// A sample of several documents has the loss and the gradients of each by itself, weighed by its tokens.
TEST(SeparateDocuments, AreTrainedAsIfAlone) {
  for (const auto& [name, spec] : cases()) {
    if (spec.dropout > 0) continue;
    const auto sample = tokens(spec, 1, 0, samples);
    const auto input = sample.narrow(1, 0, sequence), target = sample.narrow(1, 1, sequence);
    const auto starts = documents(1, 0, samples);
    const auto model = build_model(spec, {.seed = 3, .dtype = at::kDouble}),
               alone = build_model(spec, {.seed = 3, .dtype = at::kDouble});
    model->set_documents(starts);
    const auto loss = model->loss(input, target);
    loss.backward();
    double sum = 0;
    for (std::int64_t row = 0; row < samples; ++row)
      for (std::int64_t begin = 0, end = 0; begin < sequence; begin = end) {
        for (end = begin + 1; end < sequence && starts[row][end].item<std::int64_t>() != end;) ++end;
        const auto piece = [&](const at::Tensor& of) { return of.narrow(0, row, 1).narrow(1, begin, end - begin); };
        const auto own = alone->loss(piece(input), piece(target)) * static_cast<double>(end - begin) /
                         static_cast<double>(samples * sequence);
        own.backward();
        sum += own.item<double>();
      }
    EXPECT_NEAR(loss.item<double>(), sum, 1e-12 * sum) << name;
    const auto seen = model->named_parameters(), expected = alone->named_parameters();
    for (const auto& parameter : expected)
      EXPECT_LE((seen[parameter.key()].grad() - parameter.value().grad()).norm().item<double>(),
                1e-12 * parameter.value().grad().norm().item<double>() + 1e-15)
          << name << ": " << parameter.key();
    // And back.
    model->set_documents({});
    EXPECT_NE(model->loss(input, target).item<double>(), loss.item<double>());
  }
}

TEST(SharedSamples, RefuseOtherModels) {
  run_ranks(2, [](World& world) {
    testing::expect_part(testing::thrown<ConfigError>([&] {
                           build_model(plan::ModelSpec{.type = plan::ModelType::mlp},
                                       {.context = {.group = world.mesh({.context = 2}).group(Axis::context)}});
                         }),
                         "a mlp over 2 ranks that share samples; allowed: llama | gpt2");
  });
}

}  // namespace
}  // namespace bonfire::context_test
