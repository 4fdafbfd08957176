// A checkpoint in another number of files, and state that is whole on one rank.
#include "bonfire/checkpoint/reshard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/full_state.h"
#include "tests/checkpoint/saved_training.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::reshard_test {
namespace {

namespace fs = std::filesystem;
using testing::Division;
using testing::divisions;
using testing::expect_part;
using testing::Folder;
using testing::run_ranks;
using testing::SavedTraining;
using testing::thrown;

class Resharded : public ::testing::Test {
 protected:
  Resharded() {
    run_ranks(4, [&](World& world) {
      SavedTraining run(world, divisions().back());
      run.step(0);
      Checkpoints checkpoints(world, folder_.path(), {.configuration = "[run]\n"});
      checkpoints.save_now(1, run.contents());
    });
  }
  fs::path from() const { return folder_.path() / checkpoint_name(1); }

  Folder folder_;
};

TEST_F(Resharded, TheSameTensorsInAnyNumberOfFiles) {
  const auto before = read_manifest(from());
  for (const int parts : {1, 2, 3, 7, 64}) {
    const fs::path to = folder_ / fmt::format("parts-{}", parts);
    std::uint64_t bytes = 0, written = 0;
    reshard_checkpoint(from(), to, {.parts = parts, .progress = [&](std::uint64_t more) { written += more; }});
    EXPECT_EQ(verify_checkpoint(to), std::vector<std::string>());
    EXPECT_TRUE(compare_checkpoints(from(), to).empty());
    const auto after = read_manifest(to);
    EXPECT_EQ(after.step, 1);
    EXPECT_EQ(after.configuration, "[run]\n");
    EXPECT_EQ(after.states, before.states);
    EXPECT_EQ(after.tensors.size(), before.tensors.size());
    std::map<std::string, std::uint64_t> sizes;
    for (const auto& tensor : after.tensors) {
      bytes += static_cast<std::uint64_t>(elements_of(whole_box(tensor.shape)) * bytes_of(tensor.type));
      EXPECT_LE(tensor.pieces.size(), static_cast<std::size_t>(parts)) << tensor.name;
      for (const auto& piece : tensor.pieces)
        sizes[piece.file] += static_cast<std::uint64_t>(piece.piece.count * bytes_of(tensor.type));
    }
    EXPECT_EQ(written, bytes);
    // About as much in each: within an element.
    for (const auto& [file, size] : sizes)
      EXPECT_NEAR(static_cast<double>(size), static_cast<double>(bytes) / parts, 8) << file;
    EXPECT_EQ(sizes.size(), static_cast<std::size_t>(parts));
  }
}

TEST_F(Resharded, TrainingGoesOnFromIt) {
  const fs::path to = folder_ / "other";
  reshard_checkpoint(from(), to, {.parts = 3});
  std::vector<double> losses;
  for (const auto& checkpoint : {from(), to})
    run_ranks(2, [&](World& world) {
      SavedTraining run(world, {});
      EXPECT_EQ(load_checkpoint(world, checkpoint, run.contents()), 1);
      run.step(1);
      const double loss = run.step(2);
      if (world.rank() == 0) losses.push_back(loss);
    });
  EXPECT_EQ(losses.at(0), losses.at(1));
}

TEST_F(Resharded, WhatCannotBeIsRefusedAndLeavesNothing) {
  expect_part(thrown<ConfigError>([&] { reshard_checkpoint(from(), folder_ / "more", {.parts = 0}); }), "in 0 parts");
  expect_part(thrown<ConfigError>([&] { reshard_checkpoint(from(), from(), {}); }), "exists already");
  const auto file = from() / "rank-00001.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  expect_part(thrown<BrokenCheckpoint>([&] { reshard_checkpoint(from(), folder_ / "more", {}); }), "rank-00001.safetensors");
  EXPECT_FALSE(fs::exists(folder_ / "more"));
  for (const auto& entry : fs::directory_iterator(folder_.path())) EXPECT_NE(entry.path().extension(), ".part");
}

TEST_F(Resharded, WhatLiesBesideStays) {
  fs::create_directory(folder_ / "other.part");
  folder_.write("other.part/mine", "words");
  reshard_checkpoint(from(), folder_ / "other", {});
  EXPECT_EQ(folder_.read("other.part/mine"), "words");
}

class Whole : public ::testing::TestWithParam<Division> {};

TEST_P(Whole, StateIsWholeOnTheRankThatAsksForIt) {
  const Folder folder;
  for (const int asking : {0, 3})
    run_ranks(4, [&](World& world) {
      SavedTraining run(world, GetParam());
      run.step(0);
      Checkpoints checkpoints(world, folder.path());
      checkpoints.save_now(1, run.contents());
      const auto state = full_state(world, run.contents().tensors, {.rank = asking});
      if (world.rank() != asking) {
        EXPECT_TRUE(state.empty());
        return;
      }
      const auto manifest = read_manifest(folder.path() / checkpoint_name(1));
      std::size_t kept = 0;
      for (const auto& tensor : manifest.tensors) kept += is_hint(tensor.kind) ? 0 : 1;
      EXPECT_EQ(state.size(), kept);
      for (const auto& tensor : state) {
        const auto* saved = manifest.find(tensor.name, tensor.kind);
        ASSERT_NE(saved, nullptr) << tensor.name;
        const auto values = read_tensor(folder.path() / checkpoint_name(1), manifest, *saved);
        EXPECT_EQ(tensor.values.sizes(), values.sizes());
        EXPECT_TRUE(tensor.values.equal(values)) << tensor.name << " " << tensor.kind;
      }
    });
}

// One tensor at a time, and only what is wanted.
TEST_P(Whole, OrAsAStream) {
  run_ranks(4, [&](World& world) {
    SavedTraining run(world, GetParam());
    at::Tensor before;
    std::vector<std::string> names;
    int held = 0;  // by anybody else, of tensors that were handed over
    stream_state(world, {&*run.engine},
                 [&](StateTensor tensor) {
                   if (before.defined()) held += static_cast<int>(before.use_count()) - 1;
                   before = tensor.values;
                   names.push_back(tensor.name);
                 },
                 {.wanted = [](const std::string&, const std::string& kind) { return kind == "value"; }});
    if (world.rank() != 0) {
      EXPECT_TRUE(names.empty());
      return;
    }
    EXPECT_EQ(held, 0);
    std::vector<std::string> expected;
    for (const auto& each : run.net->named_parameters()) expected.push_back(each.key());
    std::sort(names.begin(), names.end());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(names, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Whole, ::testing::ValuesIn(divisions()));

}  // namespace
}  // namespace bonfire::reshard_test
