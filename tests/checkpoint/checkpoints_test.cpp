// Saving and loading from a program: on any layout, on any other, whatever has happened to the files.
#include "bonfire/checkpoint/checkpoints.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/pace.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::checkpoints_test {
namespace {

namespace fs = std::filesystem;
using testing::Division;
using testing::divisions;
using testing::expect_part;
using testing::Folder;
using testing::run_ranks;
using testing::SavedTraining;
using testing::thrown;

constexpr int steps = 3;

// Trains for `steps` steps from the first on, saves, and trains as many again, whose losses it returns.
std::vector<double> train_and_save(const fs::path& folder, int ranks, const Division& division,
                                   const CheckpointOptions& options = {}) {
  std::vector<double> losses;
  run_ranks(ranks, [&](World& world) {
    SavedTraining run(world, division);
    Checkpoints checkpoints(world, folder, options);
    for (int at = 0; at < steps; ++at) run.step(at);
    EXPECT_TRUE(checkpoints.save(steps, run.contents()));
    std::vector<double> own;
    for (int at = steps; at < 2 * steps; ++at) own.push_back(run.step(at));
    checkpoints.finish();
    EXPECT_EQ(checkpoints.last_saved(), steps);
    if (world.rank() == 0) losses = own;
  });
  return losses;
}

void expect_resumes(const fs::path& folder, int ranks, const Division& division, const std::vector<double>& losses) {
  run_ranks(ranks, [&](World& world) {
    SavedTraining run(world, division);
    Checkpoints checkpoints(world, folder);
    run.step(7);  // it has been somewhere else
    ASSERT_EQ(checkpoints.load_latest(run.contents()), steps);
    EXPECT_EQ(run.optimizer->steps(), steps);
    EXPECT_TRUE(run.statistics.equal(at::arange(6, at::kDouble).view({2, 3}).t() + steps));
    for (int at = 0; at < steps; ++at)
      EXPECT_NEAR(run.step(steps + at), losses[static_cast<std::size_t>(at)], 1e-12) << "step " << at;
    run.engine->check_equal();
  });
}

class Layouts : public ::testing::TestWithParam<Division> {};

TEST_P(Layouts, AnyOtherLayoutGoesOnFromIt) {
  const Folder folder;
  const auto losses = train_and_save(folder.path(), 4, GetParam());
  for (const auto& division : divisions()) expect_resumes(folder.path(), 4, division, losses);
  expect_resumes(folder.path(), 1, {}, losses);
  expect_resumes(folder.path(), 3, {}, losses);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Layouts, ::testing::ValuesIn(divisions()));

TEST(Checkpoints, AreWhatWasThereWhenTheyWereBegun) {
  for (const bool asynchronous : {false, true}) {
    const Folder folder;
    const auto losses = train_and_save(folder.path(), 2, {}, {.asynchronous = asynchronous});
    expect_resumes(folder.path(), 1, {}, losses);
  }
}

TEST(Checkpoints, WhereThereAreNoneNothingIsLoaded) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder.path() / "deep" / "down");
    EXPECT_EQ(checkpoints.load_latest(run.contents()), std::nullopt);
    EXPECT_EQ(checkpoints.last_saved(), std::nullopt);
  });
}

TEST(Checkpoints, TheNewestAreKept) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder.path(), {.keep = 2});
    for (int at = 1; at <= 4; ++at) checkpoints.save(at, run.contents());
    checkpoints.finish();
  });
  std::vector<std::string> names;
  for (const auto& path : complete_checkpoints(folder.path())) names.push_back(path.filename());
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000004", "step-00000003"}));
  EXPECT_EQ(folder.read("latest"), "step-00000004\n");
}

// A run that has gone back does not come to the later ones, and saves a step again.
TEST(Checkpoints, ThoseOfAFutureThatIsGoneGoFirst) {
  const Folder folder;
  const auto save = [&](const std::vector<int>& at, int keep) {
    run_ranks(1, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, folder.path(), {.keep = keep});
      for (const int step : at) {
        run.step(step);
        checkpoints.save(step, run.contents());
      }
      checkpoints.finish();
    });
  };
  save({10, 20, 30, 40}, 0);
  EXPECT_EQ(complete_checkpoints(folder.path()).size(), 4u);
  const auto before = folder.read(fs::path("step-00000020") / manifest_name);
  save({20}, 2);
  std::vector<std::string> names;
  for (const auto& path : complete_checkpoints(folder.path())) names.push_back(path.filename());
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000020", "step-00000010"}));
  EXPECT_NE(folder.read(fs::path("step-00000020") / manifest_name), before);
  EXPECT_EQ(verify_checkpoint(folder / "step-00000020"), std::vector<std::string>());
}

// Whichever steps there are: "latest" names where the run is.
TEST(Checkpoints, ARunThatWentBackGoesOnFromWhatItSavedLast) {
  const Folder folder;
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder.path(), {.keep = 0});
    for (const int step : {10, 20, 30}) checkpoints.save(step, run.contents());
    checkpoints.finish();
    load_checkpoint(world, folder / "step-00000010", run.contents());
    checkpoints.save(15, run.contents());
    EXPECT_EQ(checkpoints.load_latest(run.contents()), 15);
  });
  std::vector<std::string> names;
  for (const auto& path : complete_checkpoints(folder.path())) names.push_back(path.filename());
  EXPECT_EQ(names, (std::vector<std::string>{"step-00000015", "step-00000010", "step-00000030", "step-00000020"}));
  // Without it, the last step.
  fs::remove(folder / "latest");
  EXPECT_EQ(latest_checkpoint(folder.path())->filename(), "step-00000030");
}

// A thread that would pause for days goes on when it is waited for.
TEST(Pace, PausesUntilItIsToHurry) {
  Pace pace(1e-9);
  pace.begin();
  std::atomic<bool> hurries{false};
  std::atomic<pid_t> thread{0};
  std::thread keeps([&] {
    thread = gettid();
    while (!hurries) pace.keep();
  });
  const auto pauses = [&] {
    std::ifstream in(fmt::format("/proc/self/task/{}/stat", thread.load()));
    std::string number, name, state;
    in >> number >> name >> state;
    return state == "S";
  };
  while (thread == 0 || !pauses()) std::this_thread::yield();
  hurries = true;
  pace.hurry();
  keeps.join();
}

// --- What has happened to the files.

class Damaged : public ::testing::Test {
 protected:
  Damaged() {
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, folder_.path());
      run.step(0);
      checkpoints.save(1, run.contents());
      run.step(1);
      checkpoints.save(2, run.contents());
      checkpoints.finish();
    });
  }
  fs::path newest() const { return folder_ / "step-00000002"; }
  static void flip(const fs::path& file, std::int64_t from_end) {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(-from_end, std::ios::end);
    const auto byte = static_cast<char>(stream.get() ^ 1);
    stream.seekp(-from_end, std::ios::end);
    stream.put(byte);
  }
  // The step that is loaded, on all ranks.
  int loaded() const {
    std::vector<int> steps(2, -1);
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, folder_.path());
      steps[static_cast<std::size_t>(world.rank())] = static_cast<int>(checkpoints.load_latest(run.contents()).value_or(0));
    });
    EXPECT_EQ(steps[0], steps[1]);
    return steps[0];
  }
  std::string problem() const {
    const auto problems = verify_checkpoint(newest());
    EXPECT_EQ(problems.size(), 1u);
    return problems.empty() ? "" : problems.front();
  }

  Folder folder_;
};

TEST_F(Damaged, NothingIsWrongWithWhatWasSaved) {
  EXPECT_EQ(verify_checkpoint(newest()), std::vector<std::string>());
  EXPECT_EQ(loaded(), 2);
}

TEST_F(Damaged, AFlippedByteIsFoundAndTheOneBeforeIsLoaded) {
  flip(newest() / "rank-00001.safetensors", 1);
  expect_part(problem(), "rank-00001.safetensors");
  expect_part(problem(), "checksum differs");
  EXPECT_EQ(loaded(), 1);
}

// Headers, names, offsets and the manifest as well as values.
TEST_F(Damaged, AByteThatIsFlippedAnywhereIsFound) {
  std::size_t flips = 0;
  for (const auto& file : fs::directory_iterator(newest())) {
    const auto size = static_cast<std::int64_t>(file.file_size());
    for (std::int64_t from_end = size; from_end > 0; from_end -= std::max<std::int64_t>(1, size / 251), ++flips) {
      flip(file, from_end);
      EXPECT_FALSE(verify_checkpoint(newest()).empty()) << file.path() << ", byte " << size - from_end;
      flip(file, from_end);
    }
  }
  EXPECT_GT(flips, 700u);
  EXPECT_EQ(verify_checkpoint(newest()), std::vector<std::string>());
}

// Other readers believe the header; where it is not the one that was written, nobody can say what they would read.
TEST_F(Damaged, AHeaderThatClaimsMoreThanThereIs) {
  const auto file = newest() / "rank-00001.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const std::uint64_t length = std::uint64_t{1} << 60;
  stream.write(reinterpret_cast<const char*>(&length), sizeof length);
  stream.close();
  expect_part(problem(), "rank-00001.safetensors': a header of 1152921504606846976 bytes");
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, AShorterFile) {
  const auto file = newest() / "rank-00000.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  expect_part(problem(), "rank-00000.safetensors");
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, AMissingFile) {
  fs::remove(newest() / "rank-00000.safetensors");
  expect_part(problem(), "rank-00000.safetensors");
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, PartsThatWereSwapped) {
  fs::rename(newest() / "rank-00000.safetensors", newest() / "other");
  fs::rename(newest() / "rank-00001.safetensors", newest() / "rank-00000.safetensors");
  fs::rename(newest() / "other", newest() / "rank-00001.safetensors");
  EXPECT_FALSE(verify_checkpoint(newest()).empty());
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, AManifestThatIsCutShort) {
  const auto file = newest() / manifest_name;
  fs::resize_file(file, fs::file_size(file) / 2);
  expect_part(problem(), manifest_name);
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, AMissingManifestIsASaveThatDidNotEnd) {
  fs::remove(newest() / manifest_name);
  EXPECT_EQ(loaded(), 1);
}

TEST_F(Damaged, WhereAllAreBrokenNothingIsBegunAnew) {
  flip(newest() / "rank-00000.safetensors", 1);
  flip(fs::path(folder_ / "step-00000001") / "rank-00000.safetensors", 1);
  const auto words = thrown<ConfigError>([&] { loaded(); });
  expect_part(words, "none of its checkpoints can be loaded");
  expect_part(words, "step-00000002");
  expect_part(words, "step-00000001");
}

TEST_F(Damaged, ANewerFormatIsRefused) {
  const auto file = fs::path("step-00000002") / manifest_name;
  auto text = folder_.read(file);
  text.replace(text.find("\"version\": 2"), 12, "\"version\": 3");
  folder_.write(file.string(), text);
  expect_part(thrown<ConfigError>([&] { loaded(); }),
              "format version 3; this program reads versions 1 to 2: a newer Bonfire");
}

// Another user's file. Root may read everything, so a child does without that: its exit code says how it went.
TEST_F(Damaged, AFileThatMayNotBeReadIsNamed) {
  const auto file = newest() / "rank-00000.safetensors";
  fs::permissions(folder_.path(), fs::perms::all);
  fs::permissions(file, fs::perms::none);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t nobody = 65534;
    if (geteuid() == 0 && (setgroups(0, nullptr) != 0 || setgid(nobody) != 0 || setuid(nobody) != 0)) _exit(77);
    const auto problems = verify_checkpoint(newest());
    const bool named = !problems.empty() && problems.front().find("rank-00000.safetensors") != std::string::npos &&
                       problems.front().find("Permission denied") != std::string::npos;
    _exit(named && problems.front().find('\n') == std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  fs::permissions(file, fs::perms::owner_all);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this process may not become another user";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// --- Other models.

TEST_F(Damaged, AnotherModelIsRefusedByNamesAndShapes) {
  const auto refusal_of = [&](auto make) {
    return thrown<ConfigError>([&] {
      run_ranks(2, [&](World& world) {
        auto net = make();
        Engine engine = shard(world.mesh({.replicate = 2}), net);
        load_checkpoint(world, newest(), {.tensors = {&engine}});
      });
    });
  };
  expect_part(refusal_of([] { return torch::nn::Linear(3, 2); }), "not in the checkpoint: bias (value), weight (value)");
  const auto words = refusal_of([] { return testing::SmallNet(at::kDouble, 14); });
  expect_part(words, "of other shapes: ");
  expect_part(words, "first.linear.weight (value) is [14, 5] here and [13, 5] in the checkpoint");
  EXPECT_EQ(words.find("head"), std::string::npos) << words;
}

TEST_F(Damaged, TensorsThatNobodyAskedForAreAnErrorUnlessTheyMayStay) {
  const auto load = [&](const LoadSelection& selection) {
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      load_checkpoint(world, newest(), {.tensors = {&*run.engine}}, selection);
    });
  };
  expect_part(thrown<ConfigError>([&] { load({}); }), "in the checkpoint only: steps, ");
  load({.exact = false});
}

}  // namespace
}  // namespace bonfire::checkpoints_test
