// What a machine that loses its power has on its disk: what was flushed. And what is asked of the disk beside that.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/base/output_file.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/rank_file.h"
#include "tests/checkpoint/disk.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace bonfire::power_loss_test {
namespace {

namespace fs = std::filesystem;
using testing::disk;
using testing::Disk;
using testing::Folder;
using testing::run_ranks;
using testing::SavedTraining;

// Files with bytes, and folders with names, that the disk may not have.
class Volatile {
 public:
  explicit Volatile(fs::path root) : root_(std::move(root)) {
    disk.on_change = [this](Disk::What what, const std::string& path, const std::string& to) {
      const std::lock_guard lock(mutex_);
      note(what, path, to);
    };
  }
  ~Volatile() { disk.on_change = nullptr; }
  Volatile(const Volatile&) = delete;
  Volatile& operator=(const Volatile&) = delete;

  bool holds(const fs::path& path) const { return lost_.contains(path); }

  std::vector<std::string> wrong{};  // names that were given too early
  int checkpoints = 0, removed = 0;

 private:
  void note(Disk::What what, const fs::path& path, const fs::path& to) {
    if (what == Disk::What::write) lost_.insert(path);
    if (what == Disk::What::flush) lost_.erase(path);
    if (what == Disk::What::make_folder && path.string().starts_with(root_.string())) lost_.insert(path.parent_path());
    if (what != Disk::What::rename) return;
    const bool is_removal = to.filename().string().ends_with(".old.part"),
               is_checkpoint = fs::is_directory(path) && !is_removal;
    const bool is_probe = to.filename().string().starts_with("shared-");  // need not survive anything
    for (const auto& lost : lost_)
      if (!is_probe && (lost.string() == path || lost.string().starts_with(path.string() + "/")))
        wrong.push_back(to.filename().string() + " before " + lost.filename().string());
    // The one that takes its place has its name on the disk.
    if (is_removal && lost_.contains(path.parent_path())) wrong.push_back(path.filename().string() + " removed too early");
    checkpoints += is_checkpoint ? 1 : 0;
    removed += is_removal ? 1 : 0;
    if (!is_removal && !is_probe) lost_.insert(to.parent_path());
  }

  const fs::path root_;
  std::mutex mutex_;
  std::set<fs::path> lost_;
};

TEST(PowerLoss, ACheckpointHasItsNameOnceTheDiskHasAllOfIt) {
  for (const bool asynchronous : {true, false}) {
    const Folder folder;
    Volatile lost(folder.path());
    const fs::path checkpoints_folder = folder.path() / "run" / "checkpoints";
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      Checkpoints checkpoints(world, checkpoints_folder, {.keep = 2, .asynchronous = asynchronous});
      world.group().barrier().wait();
      EXPECT_FALSE(lost.holds(checkpoints_folder.parent_path()));
      EXPECT_FALSE(lost.holds(folder.path()));
      for (int at = 1; at <= 4; ++at) {
        run.step(at);
        checkpoints.save(at, run.contents());
      }
      checkpoints.finish();
      world.group().barrier().wait();
      EXPECT_FALSE(lost.holds(checkpoints_folder)) << "the names of checkpoints";
    });
    EXPECT_EQ(lost.wrong, std::vector<std::string>());
    EXPECT_EQ(lost.checkpoints, 4);
    EXPECT_EQ(lost.removed, 2);
  }
}

// --- How much is read, and how much is held.

Slice slice_of(const std::string& name, const at::Tensor& part, std::int64_t whole, std::int64_t begin) {
  Slice slice;
  slice.name = name;
  slice.kind = "value";
  slice.dtype = part.scalar_type();
  slice.shape = {whole};
  slice.box = whole_box(slice.shape);
  slice.begin = begin;
  slice.length = part.numel();
  slice.get = getter(part);
  slice.set = setter(part);
  return slice;
}

TEST(Reading, IsOfWhatTheRankNeedsAndNothingElse) {
  constexpr std::int64_t elements = std::int64_t{7} << 20;
  const Folder folder;
  const auto values = at::arange(elements, at::kFloat);
  write_rank_file(folder.path(), 0,
                  own_pieces({slice_of("a", values, elements, 0), slice_of("nobody's", values, elements, 0)}));
  const auto told = folder.path() / rank_pieces_name(0);
  const Manifest manifest{.tensors =
                              merge_pieces({parse_pieces(InputFile(told.string()).text(std::uint64_t{1} << 20), "told")})};
  constexpr std::int64_t ranks = 4, part = elements / ranks;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    auto own = at::zeros({part}, at::kFloat);
    std::atomic<std::size_t> bytes{0};
    disk.on_read = [&](std::size_t more) { bytes += more; };
    load_slices(folder.path(), manifest, {slice_of("a", own, elements, rank * part)});
    disk.on_read = nullptr;
    EXPECT_TRUE(own.equal(values.narrow(0, rank * part, part)));
    // Its own bytes, in whole stretches that have a checksum each.
    EXPECT_GE(bytes, own.nbytes());
    EXPECT_LE(bytes, own.nbytes() + 2 * checksum_bytes);
  }
}

// What is saved can be as large as what is trained: of several saves that follow each other at once one is held.
// And a save that keeps a slow pace does so until the next one waits for it.
TEST(Holding, IsOfAtMostOneCopy) {
  struct Watched final : Sliced {
    std::vector<Slice> slices() override {
      auto slice = slice_of("a", values, values.numel(), 0);
      slice.copies = 1;
      slice.get = [this](std::int64_t at, const at::Tensor& copy) {
        elements += copy.numel();
        for (const auto& storage : given)
          held += !storage.expired() && storage.lock().get() != copy.storage().unsafeGetStorageImpl() ? 1 : 0;
        given.push_back(copy.storage().getWeakStorageImpl());
        copy.copy_(values.narrow(0, at, copy.numel()));
      };
      return {slice};
    }
    void slices_written() override {}

    at::Tensor values = at::arange(std::int64_t{3} << 20, at::kFloat);
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> given{};
    int held = 0;
    std::int64_t elements = 0;
  };
  const Folder folder;
  run_ranks(1, [&](World& world) {
    Watched watched;
    Checkpoints checkpoints(world, folder.path(), {.share = 1e-9});
    std::int64_t elements = 0;
    for (int step = 1; step <= 6; ++step) {
      watched.values = at::arange((std::int64_t{1} << 20) + step, at::kFloat);  // so that more is needed each time
      elements += watched.values.numel();
      checkpoints.save(step, {.tensors = {&watched}});
    }
    checkpoints.finish();
    EXPECT_EQ(checkpoints.last_saved(), 6);
    EXPECT_EQ(watched.elements, elements);  // each is copied once
    EXPECT_EQ(watched.held, 0);
  });
}

}  // namespace
}  // namespace bonfire::power_loss_test
