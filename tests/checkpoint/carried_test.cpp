// What engines carry from step to step beside parameters.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/compare.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace bonfire::carried_test {
namespace {

using testing::Folder;
using testing::run_ranks;
using testing::SavedTraining;

constexpr const char* error_kind = "hint.powersgd_error";

ShardOptions thin() { return {.reduction = {.compression = plan::Compression::powersgd, .powersgd_rank = 1}}; }

std::vector<Slice> errors_of(Engine& engine) {
  std::vector<Slice> errors;
  for (auto& slice : engine.slices())
    if (slice.kind == error_kind) errors.push_back(std::move(slice));
  return errors;
}

// Ranks with samples of their own, so that each has an error of its own. Returns the checkpoint.
std::filesystem::path trained(const Folder& folder, int ranks) {
  run_ranks(ranks, [&](World& world) {
    SavedTraining run(world, {}, thin());
    for (int at = 0; at < 3; ++at) run.step(10 * at + world.rank());
    Checkpoints checkpoints(world, folder.path());
    checkpoints.save_now(3, run.contents());
  });
  return folder.path() / checkpoint_name(3);
}

// Loaded by so many ranks: each rank's own where they are as many, else the mean of all.
void expect_loaded(const std::filesystem::path& checkpoint, int ranks) {
  const auto manifest = read_manifest(checkpoint);
  run_ranks(ranks, [&](World& world) {
    SavedTraining run(world, {}, thin());
    run.step(5);
    load_checkpoint(world, checkpoint, run.contents());
    const auto errors = errors_of(*run.engine);
    ASSERT_FALSE(errors.empty());
    for (const auto& own : errors) {
      const auto* tensor = manifest.find(own.name, own.kind);
      ASSERT_NE(tensor, nullptr) << own.name;
      const auto all = read_tensor(checkpoint, manifest, *tensor);
      ASSERT_EQ(own.shape[0], ranks);
      const auto expected = all.size(0) == ranks ? all[world.rank()] : all.mean(0);
      EXPECT_GT(expected.abs().max().item<double>(), 0) << own.name;
      const double off = (own.read() - expected.reshape({-1})).abs().max().item<double>();
      EXPECT_LE(off, all.size(0) == ranks ? 0 : 1e-15 * all.abs().max().item<double>()) << own.name;
    }
  });
}

TEST(Carried, ErrorsOfCompressionAreEachRanksOwnAndOthersGetTheirMean) {
  const Folder folder;
  const auto checkpoint = trained(folder, 3);
  for (const int ranks : {3, 2, 4}) expect_loaded(checkpoint, ranks);
}

// They follow their parameters where backward has taught another order of buffers, also where that is learned anew.
TEST(Carried, TrainingGoesOnToTheSameBit) {
  const Folder folder;
  const auto steps = [](World& world, SavedTraining& run, int from, int to) {
    std::vector<double> losses;
    for (int at = from; at < to; ++at) losses.push_back(run.step(10 * at + world.rank()));
    return losses;
  };
  run_ranks(3, [&](World& world) {
    SavedTraining run(world, {}, thin());
    Checkpoints checkpoints(world, folder.path());
    steps(world, run, 0, 3);
    checkpoints.save(3, run.contents());
    const auto unbroken = steps(world, run, 3, 6);
    checkpoints.finish();
    SavedTraining resumed(world, {}, thin());
    ASSERT_EQ(checkpoints.load_latest(resumed.contents()), 3);
    EXPECT_EQ(steps(world, resumed, 3, 6), unbroken);
    // A second time, into one that has trained.
    ASSERT_EQ(checkpoints.load_latest(resumed.contents()), 3);
    EXPECT_EQ(steps(world, resumed, 3, 6), unbroken);
  });
}

// Without compression nobody asks for them, and with it nobody needs them.
TEST(Carried, OtherCompressionsLoadTheRest) {
  const Folder folder;
  const auto checkpoint = trained(folder, 2);
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    EXPECT_EQ(load_checkpoint(world, checkpoint, run.contents()), 3);
    Checkpoints checkpoints(world, folder.path() / "plain");
    checkpoints.save_now(4, run.contents());
    SavedTraining compressed(world, {}, thin());
    EXPECT_EQ(checkpoints.load_latest(compressed.contents()), 4);
  });
}

}  // namespace
}  // namespace bonfire::carried_test
