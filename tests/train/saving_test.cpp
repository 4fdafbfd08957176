// Runs that are saved and go on, on the same layout and on others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/train/resume.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::saving_test {
namespace {

namespace fs = std::filesystem;
using testing::common;
using testing::expect_part;
using testing::Loop;
using testing::models;
using testing::Outcome;
using testing::run_ranks;
using testing::thrown;

constexpr int whole = 8, saved = 4;

struct Layout {
  const char* name;
  int ranks;
  std::vector<std::string> overrides;
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{{"one", 1, {}},
                                       {"two", 2, {"layout.shard=2", "layout.sharded=parameters"}},
                                       {"three", 3, {}},
                                       {"four", 4, {"layout.shard=4", "layout.sharded=optimizer"}},
                                       {"replicas", 4, {}},
                                       {"tensor", 2, {"layout.tensor=2"}},
                                       {"split_and_sharded", 4, {"layout.tensor=2", "layout.shard=2", "train.microbatch=6"}},
                                       {"pipeline", 2, {"layout.pipeline=2", "train.microbatch=12"}}};
  return all;
}

class Saving : public Loop {
 protected:
  // Goes on in the folder, where something is saved.
  Outcome go_on(const fs::path& folder, const std::string& sections, const Layout& layout,
                std::vector<std::string> overrides = {}) {
    overrides.insert(overrides.begin(), layout.overrides.begin(), layout.overrides.end());
    overrides.push_back(fmt::format("train.steps={}", whole));
    overrides.push_back("run.device=cpu");
    Config config = parse_config(sections + common, "a.toml", overrides);
    resolve(config, layout.ranks);
    Outcome outcome{.folder = folder};
    run_ranks(layout.ranks, [&](World& world) {
      const auto report = train(world, config, {.folder = folder, .resume = true});
      if (world.rank() == 0) outcome.report = report;
    });
    std::ifstream in(folder / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) outcome.metrics.push_back(nlohmann::json::parse(line));
    return outcome;
  }
  Outcome begin(const std::string& model, const Layout& layout, int steps, std::vector<std::string> more = {}) {
    more.insert(more.begin(), layout.overrides.begin(), layout.overrides.end());
    more.push_back(fmt::format("train.steps={}", steps));
    // So that the learning rate is that of the whole run, whenever it is cut off.
    more.push_back("optimizer.decay=constant");
    return run(model, layout.ranks, more);
  }
};

class Moved : public Saving, public ::testing::WithParamInterface<std::size_t> {};

TEST_P(Moved, EveryLayoutGoesOnFromIt) {
  const auto& from = layouts()[GetParam()];
  const auto unbroken = begin("gpt2", from, whole).losses();
  const auto part = begin("gpt2", from, saved);
  ASSERT_EQ(part.report.checkpoint, (part.folder / "checkpoints" / "step-00000004").string());
  for (const auto& to : layouts()) {
    const auto copy = scratch_.path() / to.name;
    fs::copy(part.folder, copy, fs::copy_options::recursive);
    const auto rest = go_on(copy, models.at("gpt2"), to, {"optimizer.decay=constant"});
    const auto losses = rest.losses();
    ASSERT_EQ(losses.size(), unbroken.size());  // each step once
    for (std::size_t at = 0; at < losses.size(); ++at)
      if (std::string(from.name) == to.name)
        EXPECT_EQ(losses[at], unbroken[at]) << to.name << ", step " << at + 1;
      else
        EXPECT_NEAR(losses[at], unbroken[at], 1e-5 * std::abs(unbroken[at])) << to.name << ", step " << at + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Runs, Moved, ::testing::Range(std::size_t{0}, layouts().size()),
                         [](const auto& info) { return layouts()[info.param].name; });

TEST_F(Saving, InEveryPrecisionTheSameLayoutGoesOnToTheSameBit) {
  for (const char* precision : {"fp32", "bf16", "fp16", "fp8"}) {
    // Wide enough for all products of fp8.
    const Layout layout{
        "two",
        2,
        {"layout.shard=2", "layout.sharded=optimizer", "model.ffn=32", fmt::format("train.precision={}", precision)}};
    const auto unbroken = begin("llama", layout, whole);
    const auto part = begin("llama", layout, saved);
    if (std::string(precision) == "fp8") {
      const auto manifest = read_manifest(part.report.checkpoint);
      EXPECT_NE(manifest.find("blocks.1.feed.down.weight", "hint.fp8"), nullptr);
    }
    const auto rest = go_on(part.folder, models.at("llama"), layout, {"optimizer.decay=constant"});
    EXPECT_EQ(rest.losses(), unbroken.losses()) << precision;
    ASSERT_EQ(rest.metrics.size(), unbroken.metrics.size());
    for (std::size_t at = 0; at < rest.metrics.size(); ++at)
      EXPECT_EQ(rest.metrics[at].at("grad_norm"), unbroken.metrics[at].at("grad_norm")) << precision << ", " << at;
  }
}

// What PowerSGD has not sent yet is each rank's own.
TEST_F(Saving, WithWhatGradientsStillHaveToSend) {
  const Layout layout{"two", 2, {"layout.compression=powersgd", "layout.powersgd_rank=1"}};
  const auto unbroken = begin("llama", layout, whole), part = begin("llama", layout, saved);
  const auto other = scratch_.path() / "other";
  fs::copy(part.folder, other, fs::copy_options::recursive);
  EXPECT_EQ(go_on(part.folder, models.at("llama"), layout, {"optimizer.decay=constant"}).losses(), unbroken.losses());
  // Another number of replicas goes on as well, and so does one that sends all of it.
  for (const Layout& more : {Layout{"four", 4, layout.overrides}, Layout{"all", 3, {}}}) {
    const auto copy = scratch_.path() / more.name;
    fs::copy(other, copy, fs::copy_options::recursive);
    const auto losses = go_on(copy, models.at("llama"), more, {"optimizer.decay=constant"}).losses();
    ASSERT_EQ(losses.size(), unbroken.losses().size());
    EXPECT_NEAR(losses[saved], unbroken.losses()[saved], 1e-5 * std::abs(unbroken.losses()[saved])) << more.name;
  }
}

// The last save that came due is what a run goes on from, and steps behind it are taken, and written, again.
TEST_F(Saving, StepsAfterTheLastSaveAreTakenAgain) {
  const Layout& one = layouts()[0];
  const auto unbroken = begin("mlp", one, whole).losses();
  const auto part = begin("mlp", one, 6, {"checkpoint.every=4", "checkpoint.keep=0"});
  fs::remove_all(part.folder / "checkpoints" / "step-00000006");
  const auto rest = go_on(part.folder, models.at("mlp"), one, {"optimizer.decay=constant"});
  EXPECT_EQ(rest.losses(), unbroken);
  std::vector<int> steps;
  for (const auto& line : rest.metrics) steps.push_back(line.at("step"));
  EXPECT_EQ(steps, (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST_F(Saving, NothingIsSavedWhereNothingIsAskedFor) {
  const auto outcome = begin("mlp", layouts()[0], saved, {"checkpoint.every=0"});
  EXPECT_EQ(outcome.report.checkpoint, "");
  EXPECT_FALSE(fs::exists(outcome.folder / "checkpoints"));
}

// The batch may change on the way: the samples that come next are those that nobody has seen.
TEST_F(Saving, AnotherBatchTakesTheSamplesThatFollow) {
  const Layout& one = layouts()[0];
  const auto part = begin("mlp", one, saved);
  const auto rest = go_on(part.folder, models.at("mlp"), one, {"optimizer.decay=constant", "train.batch=24"});
  const auto manifest = read_manifest(part.folder / "checkpoints" / "step-00000008");
  EXPECT_EQ(std::get<std::int64_t>(manifest.states.at("run").at("samples")), saved * 48 + (whole - saved) * 24);
  EXPECT_EQ(rest.metrics.size(), static_cast<std::size_t>(whole));
}

// What [optimizer] and train.steps say counts from the next step on, as if it had been so from the beginning.
TEST_F(Saving, AnotherOptimizerSettingHoldsFromTheNextStepOn) {
  const Layout& one = layouts()[0];
  const std::vector<std::string> other{"optimizer.lr=0.03", "optimizer.decay=cosine", "optimizer.min_lr=0.001"};
  auto all_steps = other;
  all_steps.push_back(fmt::format("train.steps={}", whole));
  const auto from_the_beginning = run("mlp", one.ranks, all_steps);
  const auto part = begin("mlp", one, saved);
  const auto rest = go_on(part.folder, models.at("mlp"), one, other);
  ASSERT_EQ(rest.metrics.size(), static_cast<std::size_t>(whole));
  const auto lr = [](const Outcome& outcome, std::size_t at) { return outcome.metrics[at].at("lr").get<double>(); };
  for (std::size_t at = 0; at < whole; ++at)
    EXPECT_EQ(lr(rest, at), lr(at < saved ? part : from_the_beginning, at)) << "step " << at + 1;
  EXPECT_NE(lr(rest, saved), lr(part, saved - 1));
}

// The first step after it sees the weights that were saved; its update decays them as it is told now.
TEST_F(Saving, AnotherWeightDecayHoldsFromTheNextStepOn) {
  const Layout& one = layouts()[0];
  const auto part = begin("mlp", one, saved, {"optimizer.weight_decay=0"});
  const auto other = scratch_.path() / "other";
  fs::copy(part.folder, other, fs::copy_options::recursive);
  const auto same = go_on(part.folder, models.at("mlp"), one, {"optimizer.decay=constant", "optimizer.weight_decay=0"}),
             decays = go_on(other, models.at("mlp"), one, {"optimizer.decay=constant", "optimizer.weight_decay=2"});
  EXPECT_EQ(decays.losses()[saved], same.losses()[saved]);
  EXPECT_NE(decays.losses()[saved + 1], same.losses()[saved + 1]);
}

// Every rank writes about as much, whoever holds what.
TEST_F(Saving, NoRankWritesMuchMoreThanTheOthers) {
  const std::string model =
      "[model]\ntype = \"llama\"\ndim = 96\nlayers = 4\nheads = 4\nkv_heads = 2\nffn = 256\nvocab = 300\n[data]\nsequence = "
      "6\nbranching = 4\n";
  for (const auto& overrides :
       std::vector<std::vector<std::string>>{{},
                                             {"layout.replicate=2", "layout.shard=2", "layout.sharded=parameters"},
                                             {"layout.replicate=2", "layout.shard=2", "layout.sharded=optimizer"},
                                             {"layout.shard=4", "layout.sharded=parameters"}}) {
    auto all = overrides;
    all.push_back("train.steps=1");
    const auto outcome = run_text(model, 4, all);
    double sum = 0, most = 0;
    int files = 0;
    for (const auto& entry : fs::directory_iterator(outcome.report.checkpoint)) {
      if (entry.path().extension() != ".safetensors") continue;
      sum += static_cast<double>(entry.file_size());
      most = std::max(most, static_cast<double>(entry.file_size()));
      ++files;
    }
    EXPECT_EQ(files, 4);
    EXPECT_GT(sum, 4 << 20);  // parameters and two moments of each
    EXPECT_LE(most, 1.1 * sum / 4) << fmt::format("{}", fmt::join(overrides, " "));
  }
}

// With weights that do not change, the loss of a step says which samples it has seen: one step of two batches sees what two
// steps of one have seen, whoever takes them.
TEST_F(Saving, EverySampleIsSeenOnceAlsoWhereBatchAndLayoutChange) {
  const std::vector<std::string> still{"optimizer.lr=0", "optimizer.decay=constant"};
  const auto losses_of_one = begin("mlp", layouts()[0], 12, still).losses();
  const auto expected = [&](std::size_t first, std::size_t batches) {
    double sum = 0;
    for (std::size_t at = first; at < first + batches; ++at) sum += losses_of_one[at];
    return sum / static_cast<double>(batches);
  };
  const auto part = begin("mlp", layouts()[1], saved, still);
  // Steps 5 to 8 take two batches each; the run ends at step 6, and its last step is lost.
  const auto twice = [&](const Layout& layout, const std::vector<std::string>& more) {
    std::vector<std::string> all = still;
    all.push_back("train.batch=96");
    all.insert(all.end(), more.begin(), more.end());
    return go_on(part.folder, models.at("mlp"), layout, all);
  };
  twice(layouts()[2], {"checkpoint.keep=0", "checkpoint.every=1"});
  fs::remove_all(part.folder / "checkpoints" / "step-00000008");
  fs::remove_all(part.folder / "checkpoints" / "step-00000007");
  const auto losses = twice(layouts()[4], {}).losses();
  ASSERT_EQ(losses.size(), static_cast<std::size_t>(whole));
  for (std::size_t step = 0; step < losses.size(); ++step) {
    const double same = step < saved ? expected(step, 1) : expected(saved + 2 * (step - saved), 2);
    EXPECT_NEAR(losses[step], same, 1e-6 * std::abs(same)) << "step " << step + 1;
  }
}

TEST_F(Saving, WhatMakesItAnotherRunIsRefusedByTheKey) {
  const auto resolved = [](const std::string& key) {
    std::vector<std::string> overrides;
    if (!key.empty()) overrides.push_back(key);
    Config config = parse_config(models.at("llama") + common, "a.toml", overrides);
    resolve(config, 2);
    return config;
  };
  const auto before = to_toml(resolved(""));
  const auto refusal = [&](const std::string& key) {
    return thrown<ConfigError>([&] { require_resumable(resolved(key), before, "manifest.json"); });
  };
  for (const char* key :
       {"model.dim=32", "data.sequence=5", "data.seed=2", "train.seed=2", "optimizer.type=sgd", "optimizer.amsgrad=true",
        "data.branching=3", "data.held_out=0.5", "train.freeze=[\"embedding\"]"}) {
    const auto name = std::string(key).substr(0, std::string(key).find('='));
    expect_part(refusal(key), name + " = ");
    expect_part(refusal(key), "it cannot change on the way");
  }
  for (const char* key : {"", "train.steps=100", "optimizer.lr=0.5", "train.batch=24", "layout.shard=2",
                          "train.precision=bf16", "checkpoint.every=7", "train.clip=0", "optimizer.weight_decay=0",
                          "train.clip_value=0.5", "train.nan_policy=skip", "train.keep_for_backward=all",
                          "train.start=broadcast", "train.microbatch=6", "optimizer.betas=[0.8, 0.9]", "optimizer.warmup=3"})
    EXPECT_EQ(refusal(key), "");
}

}  // namespace
}  // namespace bonfire::saving_test
