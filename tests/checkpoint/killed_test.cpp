// kill -9 at each call that a save makes to the disk: every checkpoint that has its name is whole, and the next run goes on.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "tests/checkpoint/disk.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace bonfire::killed_test {
namespace {

namespace fs = std::filesystem;
using testing::disk;
using testing::Folder;
using testing::run_ranks;
using testing::run_shell;
using testing::SavedTraining;

constexpr const char* folder_variable = "BONFIRE_KILLED_IN";

// The save that is killed: of the next step, which removes the one before, or of the same step once more, where names can be
// exchanged and where they cannot.
enum class Case { next, again, without_exchange };
constexpr Case cases[] = {Case::next, Case::again, Case::without_exchange};

fs::path folder_of(const fs::path& all, Case which, int call) {
  return all / fmt::format("case-{}", static_cast<int>(which)) / std::to_string(call);
}

void save_and_die(const fs::path& folder, Case which, int call) {
  disk.exchanges = which != Case::without_exchange;
  disk.dies = true;
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder, {.keep = 1});
    run.step(0);
    checkpoints.save_now(1, run.contents());
    world.group().barrier().wait();
    if (world.rank() == 0) {
      disk.failing = call;
      disk.within = folder.string();
    }
    world.group().barrier().wait();
    checkpoints.save(which == Case::next ? 2 : 1, run.contents());
    checkpoints.finish();
  });
}

// In a process of its own, in which nothing has run that a fork would not survive. Each child is killed at the next call,
// until one ends by itself.
TEST(Killed, DISABLED_AtEachCall) {
  const char* folder = std::getenv(folder_variable);
  ASSERT_NE(folder, nullptr);
  for (const Case which : cases)
    for (int call = 1;; ++call) {
      ASSERT_LT(call, 400);
      const auto own = folder_of(folder, which, call);
      fs::create_directories(own);
      const pid_t child = fork();
      ASSERT_GE(child, 0);
      if (child == 0) {
        save_and_die(own, which, call);
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "call " << call << ": " << status;
    }
}

TEST(Killed, AtNoCallAnythingIsLost) {
  const Folder folder;
  const auto program = fs::read_symlink("/proc/self/exe").string();
  const auto said = run_shell(
      fmt::format("{}='{}' timeout 200 '{}' --gtest_also_run_disabled_tests --gtest_filter=Killed.DISABLED_AtEachCall",
                  folder_variable, folder.path().string(), program));
  ASSERT_EQ(said.code, 0) << said.output;
  for (const Case which : cases) {
    int call = 1, first = 0;
    for (; fs::exists(folder_of(folder.path(), which, call)); ++call) {
      const auto own = folder_of(folder.path(), which, call);
      SCOPED_TRACE(own);
      const auto complete = complete_checkpoints(own);
      ASSERT_FALSE(complete.empty());
      for (const auto& checkpoint : complete) EXPECT_EQ(verify_checkpoint(checkpoint), std::vector<std::string>());
      const std::int64_t newest = complete.front().filename() == checkpoint_name(2) ? 2 : 1;
      first += newest == 1 ? 1 : 0;
      run_ranks(1, [&](World& world) {
        SavedTraining run(world, {});
        Checkpoints checkpoints(world, own);
        EXPECT_EQ(checkpoints.load_latest(run.contents()), newest);
      });
      for (const auto& entry : fs::recursive_directory_iterator(own))
        EXPECT_FALSE(entry.path().string().ends_with(".part")) << entry.path();
    }
    EXPECT_GT(call, 40);
    if (which == Case::next) {
      EXPECT_GT(first, 30);
      EXPECT_LT(first, call - 5);  // the one before is removed afterwards
    }
  }
}

}  // namespace
}  // namespace bonfire::killed_test
