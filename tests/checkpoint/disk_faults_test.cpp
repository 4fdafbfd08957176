// A disk that refuses, at each call in turn: training goes on, and the last good checkpoint stays what it is.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/comm/stall.h"
#include "tests/checkpoint/disk.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::disk_faults_test {
namespace {

namespace fs = std::filesystem;
using testing::disk;
using testing::expect_part;
using testing::Folder;
using testing::run_ranks;
using testing::SavedTraining;
using testing::thrown;

class DiskFaults : public ::testing::Test {
 protected:
  DiskFaults() { heal(); }
  ~DiskFaults() override { heal(); }
  static void heal() {
    disk.calls = disk.failing = disk.reason = 0;
    disk.stays = false;
  }
  // Saves steps 1 and 2; while the second is saved, the disk refuses.
  void save_twice(const fs::path& folder, int failing, int reason, bool stays, const CheckpointOptions& options) {
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, folder, options);
      run.step(0);
      checkpoints.save_now(1, run.contents());
      run.step(1);
      world.group().barrier().wait();
      if (world.rank() == 0) {
        disk.calls = 0;
        disk.reason = reason;
        disk.stays = stays;
        disk.failing = failing;
      }
      world.group().barrier().wait();
      checkpoints.save(2, run.contents());
      run.step(2);
      checkpoints.finish();
      saved_ = checkpoints.last_saved().value_or(0);
      world.group().barrier().wait();
      if (world.rank() == 0) {
        calls_ = disk.calls;
        heal();
      }
      world.group().barrier().wait();
    });
  }

  std::atomic<std::int64_t> saved_{0};
  int calls_ = 0;
};

// Every call that the saving of a checkpoint makes, until one is refused that it does not make.
TEST_F(DiskFaults, EachLeavesTheLastGoodCheckpoint) {
  for (const int reason : {ENOSPC, EIO})
    for (const bool stays : {false, true}) {
      bool refused = true;
      int failing = 1, lost = 0;
      for (; refused; ++failing) {
        ASSERT_LT(failing, 200);
        const Folder folder;
        save_twice(folder.path(), failing, reason, stays, {});
        refused = calls_ >= failing;
        const auto complete = complete_checkpoints(folder.path());
        ASSERT_FALSE(complete.empty());
        for (const auto& checkpoint : complete)
          EXPECT_EQ(verify_checkpoint(checkpoint), std::vector<std::string>()) << failing;
        EXPECT_EQ(complete.front().filename(), checkpoint_name(complete.size() == 1 ? 1 : 2)) << failing;
        if (saved_ == 2) {
          EXPECT_EQ(complete.size(), 2u) << failing;
          continue;
        }
        EXPECT_EQ(saved_, 1) << failing;
        ++lost;
      }
      EXPECT_GT(failing, 8);  // files, their manifest, folders and names
      EXPECT_GT(lost, 8);
    }
}

TEST_F(DiskFaults, StopTheRunWhereThatIsAskedFor) {
  const Folder folder;
  const auto words = thrown<Error>([&] { save_twice(folder.path(), 2, ENOSPC, true, {.failed = WhenFailed::stop}); });
  expect_part(words, "a checkpoint could not be saved: ");
  expect_part(words, "No space left on device");
}

// What a save that failed has left goes when the next run begins, and takes no place from then on.
TEST_F(DiskFaults, LeaveNothingBehind) {
  const Folder folder;
  save_twice(folder.path(), 3, EIO, true, {});
  run_ranks(1, [&](World& world) { const Checkpoints checkpoints(world, folder.path()); });
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"latest", "step-00000001"}));
}

// A disk so slow that others wait for a rank that reads: the first read of rank 1 lasts until rank 0 waits for it.
TEST_F(DiskFaults, ARankThatLoadsForLongHoldsNobodyUp) {
  const Folder folder;
  std::vector<std::shared_ptr<ProgressBoard>> boards(2);
  std::atomic<std::thread::id> reader{};
  std::atomic<bool> looked{false};
  std::vector<Observed> seen;
  // Rank 0 is in a collective to which rank 1 has not come.
  const auto waits = [&] {
    const Progress progress = boards[0]->snapshot(), other = boards[1]->snapshot();
    return std::any_of(progress.lanes.begin(), progress.lanes.end(), [&](const auto& lane) {
      return lane.collective.begun > lane.collective.ended &&
             std::any_of(other.lanes.begin(), other.lanes.end(), [&](const auto& same) {
               return same.group == lane.group && same.ranks == lane.ranks && same.collective.begun < lane.collective.begun;
             });
    });
  };
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder.path());
    checkpoints.save_now(1, run.contents());
    boards[static_cast<std::size_t>(world.rank())] = world.progress();
    if (world.rank() == 1) reader = std::this_thread::get_id();
    world.group().barrier().wait();
    if (world.rank() == 0)
      disk.on_read = [&](std::size_t) {
        if (std::this_thread::get_id() != reader || looked.exchange(true)) return;
        while (!waits()) std::this_thread::yield();
        for (const auto& board : boards) seen.push_back({.progress = board->snapshot()});
      };
    world.group().barrier().wait();
    EXPECT_EQ(checkpoints.load_latest(run.contents()), 1);
  });
  disk.on_read = nullptr;
  ASSERT_EQ(seen.size(), 2u);
  const StallLimits at_once{.silent = 0, .behind = 1e-9};
  EXPECT_EQ(find_stall(seen, at_once), std::nullopt);
  // So it would be called, did it not say what it does.
  seen[1].progress.busy.clear();
  EXPECT_NE(find_stall(seen, at_once), std::nullopt);
}

// While a save is written by the thread of the run, too.
TEST_F(DiskFaults, ARankThatSavesSaysSo) {
  const Folder folder;
  std::mutex mutex;
  std::vector<std::string> doing;
  struct Asked final : Sliced {
    explicit Asked(std::function<void()> look) : look(std::move(look)) {}
    std::vector<Slice> slices() override {
      look();
      return {};
    }
    void slices_written() override {}
    std::function<void()> look;
  };
  run_ranks(2, [&](World& world) {
    Asked asked([&] {
      const std::lock_guard lock(mutex);
      doing.push_back(world.progress()->snapshot().busy);
    });
    Checkpoints checkpoints(world, folder.path());
    checkpoints.save_now(1, {.tensors = {&asked}});
    EXPECT_EQ(world.progress()->snapshot().busy, "");
  });
  EXPECT_EQ(doing, (std::vector<std::string>{"checkpoint", "checkpoint"}));
}

// A rank that has no memory for the copy has not saved, and no rank thinks that it has.
TEST_F(DiskFaults, NoMemoryForTheCopyIsASaveThatFails) {
  struct Hungry final : Sliced {
    std::vector<Slice> slices() override {
      if (!hungry) return {};
      Slice slice;
      slice.name = "more";
      slice.kind = "value";
      slice.shape = {2};
      slice.box = whole_box(slice.shape);
      slice.length = 2;
      slice.get = [](std::int64_t, const at::Tensor&) {
        TORCH_CHECK(false, "not enough memory: you tried to allocate 8 bytes");
      };
      return {slice};
    }
    void slices_written() override {}
    bool hungry = false;
  };
  for (const bool asynchronous : {true, false}) {
    const Folder folder;
    run_ranks(3, [&](World& world) {
      SavedTraining run(world, {});
      Hungry hungry;
      CheckpointContents contents = run.contents();
      contents.tensors.push_back(&hungry);
      Checkpoints checkpoints(world, folder.path(), {.asynchronous = asynchronous});
      checkpoints.save(1, contents);
      checkpoints.finish();
      hungry.hungry = world.rank() == 1;
      checkpoints.save(2, contents);
      checkpoints.finish();
      EXPECT_EQ(checkpoints.last_saved(), 1);
      hungry.hungry = false;
      checkpoints.save(3, contents);
      checkpoints.finish();
      EXPECT_EQ(checkpoints.last_saved(), 3);
    });
    EXPECT_EQ(complete_checkpoints(folder.path()).size(), 2u);
  }
}

}  // namespace
}  // namespace bonfire::disk_faults_test
