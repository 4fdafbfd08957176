// Runs of PipeDream that are saved without draining (checkpoint.drain = false).
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/load.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/train/predict.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::pipedream_saving_test {
namespace {

namespace fs = std::filesystem;
using testing::common;
using testing::expect_part;
using testing::Loop;
using testing::models;
using testing::Outcome;
using testing::run_ranks;
using testing::thrown;

struct Layout {
  const char* name;
  int ranks;
  std::vector<std::string> overrides;
};

const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"stashing", 3, {"layout.schedule=pipedream", "layout.pipeline=3", "train.microbatch=24"}},
      {"replicas", 3, {"layout.schedule=pipedream", "layout.pipeline=2", "layout.replicas=[2,1]", "train.microbatch=48"}},
      {"vertical", 3, {"layout.schedule=pipedream-vertical", "layout.pipeline=2", "layout.replicas=[1,2]"}},
      {"two_buffers", 2, {"layout.schedule=pipedream-2bw", "layout.pipeline=2", "train.microbatch=12"}},
      {"flush",
       3,
       {"layout.schedule=pipedream-flush", "layout.pipeline=2", "layout.replicas=[2,1]", "train.microbatch=12"}}};
  return all;
}

class PipeDreamSaving : public Loop, public ::testing::WithParamInterface<std::size_t> {
 protected:
  static constexpr int steps = 24, every = 6;

  Outcome begin(const Layout& layout, std::vector<std::string> more) {
    return run("mlp", layout.ranks, overrides_of(layout, std::move(more)));
  }
  // Another run, from a checkpoint on.
  Outcome go_on(const fs::path& checkpoint, const Layout& layout, std::vector<std::string> more = {}) {
    more.push_back("run.folder=" + parent_.string());
    more.push_back("run.device=cpu");
    Config config = parse_config(models.at("mlp") + common, "a.toml", overrides_of(layout, std::move(more)));
    resolve(config, layout.ranks);
    Outcome outcome;
    outcome.folder = make_run_folder(config);
    run_ranks(layout.ranks, [&](World& world) {
      const auto report = train(world, config, {.folder = outcome.folder, .begin_with = checkpoint});
      if (world.rank() == 0) outcome.report = report;
    });
    std::ifstream in(outcome.folder / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) outcome.metrics.push_back(nlohmann::json::parse(line));
    return outcome;
  }
  static std::vector<std::string> overrides_of(const Layout& layout, std::vector<std::string> more) {
    more.insert(more.begin(), layout.overrides.begin(), layout.overrides.end());
    for (const std::string key : {"model.layers=4", "checkpoint.keep=0", "optimizer.decay=constant"}) more.push_back(key);
    more.push_back(fmt::format("train.steps={}", steps));
    return more;
  }
  static fs::path checkpoint(const Outcome& outcome, int step) {
    return outcome.folder / "checkpoints" / checkpoint_name(step);
  }
};

TEST_P(PipeDreamSaving, WithoutDrainsDisturbsNothingAndGoesOnAsAfterADrain) {
  const auto& layout = layouts()[GetParam()];
  const std::string each = fmt::format("checkpoint.every={}", every);
  const auto saved = begin(layout, {each, "checkpoint.drain=false"}), plain = begin(layout, {"checkpoint.every=0"}),
             drained = begin(layout, {each});
  EXPECT_EQ(saved.error, "");
  ASSERT_EQ(saved.losses().size(), static_cast<std::size_t>(steps));
  EXPECT_EQ(saved.losses(), plain.losses());
  EXPECT_EQ(saved.report.drains, 1);
  EXPECT_EQ(drained.report.drains, steps / every);
  EXPECT_EQ(saved.report.saves.count, steps / every - 1);
  EXPECT_EQ(drained.report.saves.count, steps / every - 1);
  EXPECT_EQ(complete_checkpoints(saved.folder / "checkpoints").size(), static_cast<std::size_t>(steps / every));

  // Until the first drain both have made the same updates.
  const auto differences = compare_checkpoints(checkpoint(saved, every), checkpoint(drained, every));
  EXPECT_TRUE(differences.empty()) << differences.front().name << " " << differences.front().kind;
  for (int step = every; step < steps; step += every) {
    const auto manifest = read_manifest(checkpoint(saved, step));
    EXPECT_EQ(manifest.step, step);
    EXPECT_EQ(std::get<std::int64_t>(manifest.states.at("run").at("samples")), 48 * step);
    EXPECT_EQ(verify_checkpoint(checkpoint(saved, step)), std::vector<std::string>());
  }
  // The run that drained there has gone on with an empty pipeline as well.
  const auto rest = go_on(checkpoint(saved, every), layout, {each});
  auto expected = drained.losses();
  expected.erase(expected.begin(), expected.begin() + every);
  EXPECT_EQ(rest.losses(), expected);
  const auto last = compare_checkpoints(checkpoint(rest, steps), checkpoint(drained, steps));
  EXPECT_TRUE(last.empty()) << last.front().name << " " << last.front().kind;
}

// A contribution waits for the save before, or is left out where that is asked for; on all ranks alike.
TEST_P(PipeDreamSaving, AsOftenAsCanBe) {
  const auto& layout = layouts()[GetParam()];
  for (const char* how : {"checkpoint.busy=wait", "checkpoint.busy=skip", "checkpoint.asynchronous=false"}) {
    const auto saved = begin(layout, {"checkpoint.every=2", "checkpoint.drain=false", how});
    EXPECT_EQ(saved.error, "");
    const auto complete = complete_checkpoints(saved.folder / "checkpoints");
    if (std::string(how) == "checkpoint.busy=skip")
      EXPECT_GE(complete.size(), 2u);
    else
      EXPECT_EQ(complete.size(), static_cast<std::size_t>(steps / 2)) << how;
    for (const auto& path : complete) EXPECT_EQ(verify_checkpoint(path), std::vector<std::string>()) << how;
    EXPECT_EQ(saved.report.saves.count + 1, static_cast<std::int64_t>(complete.size())) << how;
  }
}

// Where the run is evaluated, or its trace begins, it drains all the same.
TEST_P(PipeDreamSaving, BesideOtherDrains) {
  const auto& layout = layouts()[GetParam()];
  const std::vector<std::string> both{"train.eval_every=8"};
  auto more = both;
  more.insert(more.end(), {"checkpoint.every=4", "checkpoint.drain=false"});
  const auto saved = begin(layout, more);
  more = both;
  more.push_back("checkpoint.every=0");
  EXPECT_EQ(saved.losses(), begin(layout, more).losses());
  EXPECT_EQ(saved.report.drains, 3);
  EXPECT_EQ(complete_checkpoints(saved.folder / "checkpoints").size(), 6u);
}

INSTANTIATE_TEST_SUITE_P(Runs, PipeDreamSaving, ::testing::Range(std::size_t{0}, layouts().size()),
                         [](const auto& info) { return layouts()[info.param].name; });

TEST(PipeDreamSavingKeys, OnlyWhereThereIsSomethingToDrain) {
  const auto resolved = [](std::vector<std::string> overrides, int ranks = 2) {
    Config config = parse_config(models.at("mlp") + common, "a.toml", overrides);
    resolve(config, ranks);
    return config;
  };
  const std::string off = "checkpoint.drain=false";
  const auto refusal = [&](std::vector<std::string> overrides) {
    overrides.push_back(off);
    return thrown<ConfigError>([&] { resolved(overrides); });
  };
  expect_part(refusal({}), "training without a pipeline ends every step on all ranks");
  expect_part(refusal({}), "allowed with: layout.schedule = pipedream | pipedream-vertical");
  expect_part(refusal({"layout.pipeline=2", "train.microbatch=12"}), "layout.schedule = \"1f1b\" ends");
  EXPECT_NE(refusal({"layout.server=1"}), "");
  EXPECT_EQ(refusal({"layout.pipeline=2", "layout.schedule=pipedream"}), "");
  // Each rank copies what it saves, also where all then wait until it is written.
  const std::vector<std::string> keys{"layout.pipeline=2", "layout.schedule=pipedream", "checkpoint.every=2",
                                      "checkpoint.asynchronous=false"};
  auto without = keys;
  without.push_back(off);
  EXPECT_EQ(predict_memory(resolved(keys)).saving, 0);
  EXPECT_GT(predict_memory(resolved(without)).saving, 0);
}

}  // namespace
}  // namespace bonfire::pipedream_saving_test
