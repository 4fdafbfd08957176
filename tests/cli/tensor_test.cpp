// Layers that ranks split, with the command and ranks that are processes.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::tensor_test {
namespace {

using testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 1\nheads = 4\nkv_heads = 2\n"
    "ffn = 32\nvocab = 37\n[data]\nsequence = 8\n[train]\nsteps = 10\nbatch = 12\n[optimizer]\ndecay = \"constant\"\nwarmup "
    "= 1\n[checkpoint]\nevery = 2\n";

std::vector<double> losses(const Scratch& scratch, const std::string& folder) {
  std::vector<double> all;
  std::ifstream in(scratch.path() / folder / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line).at("loss"));
  return all;
}

TEST(TensorCommand, ARunGoesOnWithOtherSplits) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto train = [&](const std::string& more) {
    const auto ended = scratch.bonfire("train a.toml " + more);
    EXPECT_EQ(ended.code, 0) << ended.err;
  };
  train("--ranks 1 --set run.name=whole");
  train("--ranks 4 --set layout.tensor=2 --set layout.shard=2 --set train.steps=2");
  train("--ranks 4 --set layout.tensor=4 --set train.steps=4 --resume latest");
  train("--ranks 2 --set layout.replicate=2 --set train.steps=6 --resume latest");
  train(
      "--ranks 4 --set layout.pipeline=2 --set layout.tensor=2 --set train.microbatch=3 --set train.steps=8 --resume "
      "latest");
  train("--ranks 4 --set layout.context=2 --set layout.tensor=2 --resume latest");
  const auto whole = losses(scratch, "runs/whole"), parts = losses(scratch, "runs/tiny");
  ASSERT_EQ(whole.size(), 10u);
  ASSERT_EQ(parts.size(), 10u);
  for (std::size_t step = 0; step < 10; ++step) EXPECT_NEAR(parts[step], whole[step], 1e-5 * whole[step]) << step;
}

// A part needs what was predicted, and less than the whole.
TEST(TensorCommand, ARankNeedsWhatWasPredicted) {
  const Scratch scratch;
  scratch.write("a.toml",
                "[run]\ndevice = \"cpu\"\n[model]\ntype = \"gpt2\"\ndim = 128\nlayers = 3\nheads = 4\nvocab = 2048\n[data]\n"
                "sequence = 128\n[train]\nbatch = 8\n");
  double before = 0;
  for (const char* layout : {"--ranks 1", "--ranks 2 --set layout.tensor=2 --set layout.sequence_parallel=false",
                             "--ranks 2 --set layout.tensor=2"}) {
    const auto ended = scratch.bonfire(fmt::format("bench step a.toml --steps 2 --json {}", layout));
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto report = nlohmann::json::parse(ended.out);
    const double measured = report.at("peak_memory_bytes"), predicted = report.at("predicted_memory_bytes");
    EXPECT_LE(std::abs(predicted - measured), 0.05 * measured)
        << layout << ": " << predicted << " predicted, " << measured << " measured";
    if (before > 0) {
      EXPECT_LT(measured, before) << layout;
    }
    before = measured;
  }
}

}  // namespace
}  // namespace bonfire::tensor_test
