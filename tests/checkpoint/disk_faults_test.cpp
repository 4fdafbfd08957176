// A disk that refuses, at each call in turn: training goes on, and the last good checkpoint stays what it is.
#include <gtest/gtest.h>

#include <algorithm>
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
    disk.exchanges = true;
    disk.within.clear();
    disk.on_change = nullptr;
  }
  struct Healed {
    ~Healed() { heal(); }  // also for whoever removes the folder of a save that threw
  };
  // Saves steps 1 and 2; while the second is saved, the disk refuses.
  void save_twice(const fs::path& folder, int failing, int reason, bool stays, const CheckpointOptions& options) {
    const Healed afterwards;
    disk.within = folder.string();
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

  static std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  std::atomic<std::int64_t> saved_{0};
  int calls_ = 0;
};

// Every call that the saving of a checkpoint makes, until one is refused that it does not make.
TEST_F(DiskFaults, EachLeavesTheLastGoodCheckpoint) {
  // A disk that is full stays so; one that is broken may fail once.
  for (const bool stays : {true, false}) {
    const int reason = stays ? ENOSPC : EIO;
    bool refused = true;
    int failing = 1, lost = 0, unsure = 0;
    for (; refused; ++failing) {
      ASSERT_LT(failing, 200);
      const Folder folder;
      save_twice(folder.path(), failing, reason, stays, {.keep = 1});
      refused = calls_ >= failing;
      const auto complete = complete_checkpoints(folder.path());
      ASSERT_FALSE(complete.empty()) << failing;
      for (const auto& checkpoint : complete)
        EXPECT_EQ(verify_checkpoint(checkpoint), std::vector<std::string>()) << failing;
      const fs::path first = folder.path() / checkpoint_name(1), second = folder.path() / checkpoint_name(2);
      if (saved_ == 2) {
        EXPECT_EQ(complete.front(), second) << failing;
      } else {
        EXPECT_EQ(saved_, 1) << failing;
        EXPECT_NE(std::find(complete.begin(), complete.end(), first), complete.end()) << failing;
        ++lost;
      }
      // A name that is there is that of a save which is called lost only where the disk may not have the name.
      if (fs::exists(second) && saved_ == 1) ++unsure;
    }
    EXPECT_GT(failing, 40);  // files, their manifest, folders and names, and all that is removed
    EXPECT_GT(lost, 30);
    EXPECT_LE(unsure, 8);  // "latest": made, written, flushed, closed, named, and the folder opened and flushed
  }
}

TEST_F(DiskFaults, StopTheRunWhereThatIsAskedFor) {
  const Folder folder;
  const auto words = thrown<Error>([&] { save_twice(folder.path(), 2, ENOSPC, true, {.failed = WhenFailed::stop}); });
  expect_part(words, "a checkpoint could not be saved: ");
  expect_part(words, "No space left on device");
}

// As NFS. A checkpoint of the same step makes room, and its place is taken.
TEST_F(DiskFaults, WhereNamesCannotBeExchangedAStepCanBeSavedAgain) {
  const Folder folder;
  disk.exchanges = false;
  std::vector<std::string> before;
  for (const int times : {1, 2}) {
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, folder.path());
      for (int at = 0; at < times; ++at) run.step(at);
      checkpoints.save_now(1, run.contents());
      EXPECT_EQ(checkpoints.last_saved(), 1);
    });
    before.push_back(folder.read(fs::path("step-00000001") / manifest_name));
    EXPECT_EQ(verify_checkpoint(folder / "step-00000001"), std::vector<std::string>());
    EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"latest", "step-00000001"}));
  }
  EXPECT_NE(before[0], before[1]);
}

// One that had made room when its run was killed counts, and has its name again as soon as the next run begins.
TEST_F(DiskFaults, ACheckpointWhoseSuccessorNeverCameServes) {
  const Folder folder;
  save_twice(folder.path(), 0, 0, false, {});
  fs::rename(folder / "step-00000002", folder / "step-00000002.replaced.part");
  EXPECT_EQ(latest_checkpoint(folder.path())->filename(), "step-00000002.replaced.part");
  run_ranks(2, [&](World& world) {
    SavedTraining run(world, {});
    Checkpoints checkpoints(world, folder.path());
    EXPECT_EQ(checkpoints.load_latest(run.contents()), 2);
  });
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"latest", "step-00000001", "step-00000002"}));
}

// While the first save is still being written, another one comes due.
TEST_F(DiskFaults, ASaveThatComesDueMeanwhileIsSkippedOrWaits) {
  for (const auto busy : {WhenBusy::skip, WhenBusy::wait}) {
    const bool skips = busy == WhenBusy::skip;
    const Folder folder;
    std::mutex mutex;
    std::vector<std::string> warnings;
    std::vector<std::shared_ptr<ProgressBoard>> boards(2);
    std::atomic<bool> goes_on{false};
    // Until rank 0 has been told that it cannot save, or waits.
    disk.on_change = [&](testing::Disk::What what, const std::string& path, const std::string&) {
      if (what != testing::Disk::What::write || path.find("step-00000001") == std::string::npos) return;
      if (path.find("rank-00000.safetensors") == std::string::npos) return;
      while (!goes_on || (!skips && boards[0]->snapshot().busy.empty())) std::this_thread::yield();
    };
    const Log log([&](LogLevel level, std::string_view words) {
      const std::lock_guard lock(mutex);
      if (level == LogLevel::warning) warnings.emplace_back(words);
    });
    run_ranks(2,
              [&](World& world) {
                SavedTraining run(world, {});
                Checkpoints checkpoints(world, folder.path(), {.keep = 0, .busy = busy});
                boards[static_cast<std::size_t>(world.rank())] = world.progress();
                world.group().barrier().wait();
                EXPECT_TRUE(checkpoints.save(1, run.contents()));
                run.step(1);
                if (!skips) goes_on = true;
                EXPECT_EQ(checkpoints.save(2, run.contents()), !skips);
                EXPECT_EQ(checkpoints.last_saved(), skips ? std::nullopt : std::optional<std::int64_t>(1));
                run.step(2);
                goes_on = true;
                checkpoints.finish();
                run.step(3);
                EXPECT_TRUE(checkpoints.save(3, run.contents()));
                checkpoints.finish();
                EXPECT_EQ(checkpoints.last_saved(), 3);
              },
              {.log = log});
    disk.on_change = nullptr;
    EXPECT_EQ(complete_checkpoints(folder.path()).size(), skips ? 2u : 3u);
    EXPECT_EQ(warnings.size(), skips ? 1u : 0u);
    if (skips) expect_part(warnings.at(0), "step 2 is not saved: the checkpoint before is still being written");
  }
}

// What a save that failed has left goes when the next run begins, and takes no place from then on.
TEST_F(DiskFaults, LeaveNothingBehind) {
  const Folder folder;
  save_twice(folder.path(), 3, EIO, true, {});
  run_ranks(1, [&](World& world) { const Checkpoints checkpoints(world, folder.path()); });
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"latest", "step-00000001"}));
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
