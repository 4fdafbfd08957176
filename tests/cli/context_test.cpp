// Ranks that share samples, and documents that keep to themselves, with the command and ranks that are processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::context_test {
namespace {

using testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 1\nheads = 4\nkv_heads = 2\n"
    "ffn = 32\nvocab = 256\n[train]\nsteps = 6\nbatch = 12\n[optimizer]\ndecay = \"constant\"\nwarmup = 1\n[checkpoint]\n"
    "every = 2\n[data]\nsequence = 16\n";

std::vector<double> losses(const Scratch& scratch, const std::string& folder) {
  std::vector<double> all;
  std::ifstream in(scratch.path() / folder / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line).at("loss"));
  return all;
}

void expect_same_losses(const Scratch& scratch) {
  const auto whole = losses(scratch, "runs/whole"), parts = losses(scratch, "runs/tiny");
  ASSERT_EQ(whole.size(), 6u);
  ASSERT_EQ(parts.size(), 6u);
  for (std::size_t step = 0; step < 6; ++step) EXPECT_NEAR(parts[step], whole[step], 1e-5 * whole[step]) << step;
}

TEST(ContextCommand, ARunGoesOnWithOtherRanks) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto train = [&](const std::string& more) {
    const auto ended = scratch.bonfire("train a.toml " + more);
    EXPECT_EQ(ended.code, 0) << ended.err;
  };
  train("--ranks 1 --set run.name=whole");
  train("--ranks 4 --set layout.context=2 --set layout.shard=2 --set train.steps=2");
  train("--ranks 4 --set layout.context=4 --set train.steps=4 --resume latest");
  train("--ranks 2 --set layout.context=2 --set layout.context_attention=heads --resume latest");
  expect_same_losses(scratch);
}

TEST(ContextCommand, TextFilesHaveDocuments) {
  const Scratch scratch;
  std::string lines;
  for (int line = 0; line < 200; ++line)
    lines += fmt::format("{{\"text\": \"{}\"}}\n",
                         std::string(static_cast<std::size_t>(line * 7 % 23 + 1), static_cast<char>('a' + line % 7)));
  scratch.write("lines.jsonl", lines);
  ASSERT_EQ(scratch.bonfire("tokens lines.jsonl -o m.bin --format megatron").code, 0);
  ASSERT_EQ(scratch.bonfire("tokens lines.jsonl -o plain.bin").code, 0);
  scratch.write("a.toml", std::string(tiny) + "type = \"tokens\"\npaths = [\"m.bin\"]\ndocuments = \"separate\"\n");
  const auto one = scratch.bonfire("train a.toml --ranks 1 --set run.name=whole"),
             two = scratch.bonfire("train a.toml --ranks 2 --set layout.context=2");
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(two.code, 0) << two.err;
  expect_same_losses(scratch);

  const auto unknown = scratch.bonfire("train a.toml --ranks 2 --set \"data.paths=['plain.bin']\"");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("llm.c's format does not say where documents end"), std::string::npos) << unknown.err;
  EXPECT_EQ(std::count(unknown.err.begin(), unknown.err.end(), '\n'), 1) << unknown.err;
}

// A rank with half of the positions needs what was predicted, and less than one with all.
TEST(ContextCommand, ARankNeedsWhatWasPredicted) {
  const Scratch scratch;
  scratch.write(
      "a.toml",
      "[run]\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 128\nlayers = 3\nheads = 4\nkv_heads = 2\nvocab = "
      "2048\n[data]\nsequence = 512\n[train]\nbatch = 4\n");
  double before = 0;
  for (const char* layout : {"--ranks 1", "--ranks 2 --set layout.context=2",
                             "--ranks 2 --set layout.context=2 --set layout.context_attention=heads",
                             "--ranks 2 --set layout.context=2 --set train.precision=bf16"}) {
    const auto ended = scratch.bonfire(fmt::format("bench step a.toml --steps 2 --json {}", layout));
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto report = nlohmann::json::parse(ended.out);
    const double measured = report.at("peak_memory_bytes"), predicted = report.at("predicted_memory_bytes");
    EXPECT_LE(std::abs(predicted - measured), 0.05 * measured)
        << layout << ": " << predicted << " predicted, " << measured << " measured";
    if (before == 0)
      before = measured;
    else
      EXPECT_LT(measured, before) << layout;
  }
}

}  // namespace
}  // namespace bonfire::context_test
