// PipeDream saved while minibatches are on their way: each rank when it has made the updates of a minibatch.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/manifest.h"
#include "tests/pipeline/pipedream_trained.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::pipedream_saving_test {
namespace {

namespace fs = std::filesystem;
using schedule::WeightMode;
using testing::expect_weights;
using testing::Folder;
using testing::Oracle;
using testing::OracleRun;
using testing::robin_of;
using testing::run_of;
using testing::run_ranks;
using testing::Trained;

int ranks_of(const OracleRun& run) { return std::accumulate(run.replicas.begin(), run.replicas.end(), 0); }

CheckpointContents contents_of(Trained& trained) { return {.tensors = {trained.pipeline.get(), trained.optimizer.get()}}; }

// Where a run is in its data.
struct Position final : Stateful {
  std::int64_t minibatches = 0;
  State save() const override { return {{"minibatches", minibatches}}; }
  void load(const State& state) override { minibatches = state_value<std::int64_t>(state, "minibatches"); }
};

// All weights, with the bits they have.
struct Weights {
  std::mutex mutex;
  std::map<std::string, at::Tensor> named;

  void add(PipeDream& pipeline) {
    const auto whole = pipeline.engine().full_parameters();
    const std::lock_guard lock(mutex);
    for (const auto& item : pipeline.module().named_parameters()) named[item.key()] = item.value().detach().clone();
  }
};

void expect_equal(const Weights& a, const Weights& b) {
  ASSERT_EQ(a.named.size(), b.named.size());
  for (const auto& [name, value] : a.named) EXPECT_TRUE(value.equal(b.named.at(name))) << name;
}

// Trains without ever draining, and saves after every `every` minibatches; 0: never.
void train(const OracleRun& run, int minibatches, int every, const fs::path& folder, Weights& weights,
           const CheckpointOptions& options = {.keep = 0}) {
  run_ranks(ranks_of(run), [&](World& world) {
    Trained trained(world, run);
    Checkpoints checkpoints(world, folder, options);
    Position position;
    const auto due = [&](std::int64_t step) { return every > 0 && step > 0 && step % every == 0 && step < minibatches; };
    trained.after_update = [&](const StageUpdate& update) {
      const auto step = update.minibatch + 1;
      if (due(step)) {
        EXPECT_TRUE(checkpoints.contribute(step, contents_of(trained).tensors));
      }
    };
    for (int at = 1; at <= minibatches; ++at) {
      position.minibatches = at;
      if (due(at)) checkpoints.announce(at, {{"run", &position}});
      trained.train(run, 1);
      // By then all ranks have contributed.
      const int behind = at - 2 * trained.pipeline->minibatches_on_their_way();
      if (due(behind)) checkpoints.join(behind);
    }
    trained.pipeline->drain();
    EXPECT_EQ(trained.pipeline->drains(), 1);
    checkpoints.finish();
    weights.add(*trained.pipeline);
  });
}

// Goes on from the checkpoint of a step, and trains with so many minibatches.
void expect_resumes(const OracleRun& run, const fs::path& folder, int step, int minibatches) {
  SCOPED_TRACE(fmt::format("resumed after {}", step));
  // The state in which every stage had all minibatches up to there, and begins with an empty pipeline.
  Oracle oracle(run);
  oracle.train(step);
  oracle.drain();
  oracle.train(minibatches);
  run_ranks(ranks_of(run), [&](World& world) {
    Trained trained(world, run);
    trained.train(run, robin_of(run).round());  // it has been somewhere else
    trained.pipeline->drain();
    Position position;
    auto contents = contents_of(trained);
    contents.states["run"] = &position;
    ASSERT_EQ(load_checkpoint(world, folder / checkpoint_name(step), contents), step);
    EXPECT_EQ(position.minibatches, step);
    trained.minibatches = position.minibatches;
    trained.train(run, minibatches);
    trained.pipeline->drain();
    expect_weights(*trained.pipeline, oracle);
  });
}

// The same step, saved behind a drain.
void save_drained(const OracleRun& run, const fs::path& folder, int step) {
  run_ranks(ranks_of(run), [&](World& world) {
    Trained trained(world, run);
    Checkpoints checkpoints(world, folder);
    Position position;
    position.minibatches = step;
    trained.train(run, step);
    trained.pipeline->drain();
    auto contents = contents_of(trained);
    contents.states["run"] = &position;
    checkpoints.save_now(step, contents);
  });
}

void expect_saves(const OracleRun& run) {
  SCOPED_TRACE(fmt::format("{} on {}, {}", run.mode, fmt::join(run.replicas, "-"), run.adam ? "adam" : "momentum"));
  const int every = robin_of(run).round() * (robin_of(run).round() == 1 ? 3 : 1), minibatches = 5 * every;
  const Folder folder;
  Weights saved, plain;
  train(run, minibatches, every, folder.path() / "saved", saved);
  train(run, minibatches, 0, folder.path() / "plain", plain);
  // Saving has disturbed nothing.
  expect_equal(saved, plain);
  EXPECT_EQ(complete_checkpoints(folder.path() / "saved").size(), 4u);
  for (const int step : {every, 4 * every}) expect_resumes(run, folder.path() / "saved", step, 2 * every);
  save_drained(run, folder.path() / "drained", 3 * every);
  const auto name = checkpoint_name(3 * every);
  const auto differences = compare_checkpoints(folder.path() / "saved" / name, folder.path() / "drained" / name);
  EXPECT_TRUE(differences.empty()) << differences.front().name << " " << differences.front().kind;
}

TEST(PipeDreamSaving, GoesOnFromWhereEveryStageHadTheSameMinibatches) {
  for (const auto mode : {WeightMode::stashing, WeightMode::vertical, WeightMode::two_buffers, WeightMode::flush})
    for (const auto& replicas : {std::vector{1, 1, 1}, {2, 1}, {2, 3}, {1, 2, 1}}) expect_saves(run_of(replicas, mode));
}

TEST(PipeDreamSaving, WithAdam) {
  auto run = run_of({2, 1}, WeightMode::stashing);
  run.adam = true;
  run.lr = 0.01;
  expect_saves(run);
}

// What comes out without stashing is no mode's, but it is the same after a save.
TEST(PipeDreamSaving, WithoutStashing) {
  auto run = run_of({1, 1, 1}, WeightMode::stashing);
  run.stash = false;
  const Folder folder;
  Weights saved, plain;
  train(run, 9, 3, folder.path(), saved);
  train(run, 9, 0, folder.path() / "plain", plain);
  expect_equal(saved, plain);
  EXPECT_EQ(complete_checkpoints(folder.path()).size(), 2u);
}

// As often as can be: each contribution waits for the save before, which others have yet to contribute to.
TEST(PipeDreamSaving, AfterEveryRound) {
  for (const auto mode : {WeightMode::stashing, WeightMode::vertical, WeightMode::two_buffers, WeightMode::flush})
    for (const auto& replicas : {std::vector{1, 1, 1, 1}, {3, 1}, {1, 2, 1}})
      for (const bool asynchronous : {true, false}) {
        const auto run = run_of(replicas, mode);
        const int round = robin_of(run).round();
        SCOPED_TRACE(fmt::format("{} on {}", run.mode, fmt::join(replicas, "-")));
        const Folder folder;
        Weights weights;
        train(run, 8 * round, round, folder.path(), weights, {.keep = 0, .asynchronous = asynchronous});
        EXPECT_EQ(complete_checkpoints(folder.path()).size(), 7u);
      }
}

// Rank 0 says so when the save is announced: the one before is not complete, because no rank has contributed to it.
TEST(PipeDreamSaving, IsSkippedOnAllRanksOrOnNone) {
  const Folder folder;
  run_ranks(3, [&](World& world) {
    const auto run = run_of({2, 1}, WeightMode::stashing);
    Trained trained(world, run);
    Checkpoints checkpoints(world, folder.path(), {.busy = WhenBusy::skip});
    const auto tensors = contents_of(trained).tensors;
    checkpoints.announce(1, {});
    checkpoints.announce(2, {});
    EXPECT_TRUE(checkpoints.contribute(1, tensors));
    EXPECT_FALSE(checkpoints.contribute(2, tensors));
    checkpoints.finish();
    EXPECT_EQ(checkpoints.last_saved(), 1);
    EXPECT_TRUE(checkpoints.save(3, contents_of(trained)));
    // This one may not be skipped.
    checkpoints.save_now(4, contents_of(trained));
    EXPECT_EQ(checkpoints.last_saved(), 4);
  });
}

// --- What goes wrong.

// Rank 1 has contributed and written its file when rank 0 fails: there is no checkpoint, and the next run takes away what
// is there of it.
TEST(PipeDreamSaving, ARankThatFailsBeforeItContributesLeavesNoCheckpoint) {
  const auto run = run_of({1, 1}, WeightMode::stashing);
  const Folder folder;
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder.path())) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  };
  std::atomic<bool> there{false};
  const auto words = testing::thrown<Error>([&] {
    run_ranks(2, [&](World& world) {
      Trained trained(world, run);
      Checkpoints checkpoints(world, folder.path());
      checkpoints.save_now(1, contents_of(trained));
      checkpoints.announce(2, {});
      const auto written = [&] {
        for (const auto& name : names())
          if (name.ends_with(".part") && fs::exists(folder.path() / name / "rank-00001.json")) return true;
        return false;
      };
      if (world.rank() == 1) checkpoints.contribute(2, contents_of(trained).tensors);
      while (!there) {
        if (world.rank() == 0) there = written();
        std::this_thread::yield();
      }
      // What rank 1 does next fails as well.
      fail("rank 0 is lost");
    });
  });
  testing::expect_part(words, "rank 0 is lost");
  ASSERT_EQ(names().size(), 3u) << fmt::format("{}", fmt::join(names(), ", "));
  EXPECT_EQ(complete_checkpoints(folder.path()).size(), 1u);
  EXPECT_EQ(folder.read("latest"), "step-00000001\n");
  run_ranks(2, [&](World& world) {
    Trained trained(world, run);
    Checkpoints checkpoints(world, folder.path());
    EXPECT_EQ(checkpoints.load_latest(contents_of(trained)), 1);
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000001"}));
}

TEST(PipeDreamSaving, IsAnnouncedOnceAndContributedToOnce) {
  const Folder folder;
  run_ranks(1, [&](World& world) {
    const auto run = run_of({1}, WeightMode::stashing);
    Trained trained(world, run);
    Checkpoints checkpoints(world, folder.path());
    const auto contents = contents_of(trained);
    const auto error = [&](const auto& what) { return testing::thrown<Error>(what); };
    testing::expect_part(error([&] { checkpoints.contribute(3, contents.tensors); }), "step 3, and no save was announced");
    checkpoints.announce(3, {});
    testing::expect_part(error([&] { checkpoints.contribute(4, contents.tensors); }),
                         "step 4, and the next that was announced is of step 3");
    testing::expect_part(error([&] { checkpoints.save(4, contents); }), "a save of step 3 was announced");
    testing::expect_part(error([&] { checkpoints.finish(); }), "a save of step 3 was announced");
    EXPECT_TRUE(checkpoints.contribute(3, contents.tensors));
    checkpoints.finish();
    EXPECT_EQ(checkpoints.last_saved(), 3);
  });
}

}  // namespace
}  // namespace bonfire::pipedream_saving_test
