// Pipelines through the command, every rank a process.
#include <algorithm>
#include <filesystem>

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::pipeline_test {
namespace {

using testing::Scratch;

constexpr const char* training = "\n[train]\nsteps = 3\nbatch = 16\nmicrobatch = 2\n";
constexpr const char* gpt2 =
    "[run]\ndevice = \"cpu\"\n[model]\ntype = \"gpt2\"\ndim = 64\nlayers = 6\nheads = 4\nvocab = 512\n"
    "[data]\nsequence = 32";
constexpr const char* llama =
    "[run]\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 64\nlayers = 6\nheads = 4\nffn = 192\n"
    "vocab = 512\n[data]\nsequence = 32";

TEST(Pipelines, TheWholePeakIsPredicted) {
  const Scratch scratch;
  for (const char* model : {gpt2, llama}) {
    scratch.write("a.toml", std::string(model) + training);
    for (const char* layout :
         {"--set layout.pipeline=2", "--set layout.pipeline=4", "--set layout.pipeline=4 --set layout.schedule=zb-h1",
          "--set layout.pipeline=2 --set layout.schedule=interleaved", "--set layout.pipeline=2 --set layout.shard=2",
          "--set layout.pipeline=2 --set layout.shard=2 --set layout.reshard_after_forward=true --set model.tied=false",
          "--set layout.pipeline=2 --set layout.shard=2 --set layout.reshard_after_forward=true --set model.tied=false "
          "--set layout.prefetch=0 "
          "--set layout.backward_prefetch=after"}) {
      const auto ended = scratch.bonfire(std::string("bench step a.toml --steps 3 --json ") + layout);
      ASSERT_EQ(ended.code, 0) << ended.err;
      const auto report = nlohmann::json::parse(ended.out);
      const double measured = report.at("peak_memory_bytes").get<double>();
      EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, 0.05 * measured) << model << layout;
    }
  }
}

TEST(Pipelines, WhatCannotBeIsOneLineAndNothingStarts) {
  const Scratch scratch;
  scratch.write("a.toml", std::string(gpt2) + training);
  scratch.write("mine.txt", "rank 0: 0F0 0SF0 0RB0 0B0\nrank 1: 1RF0 1F0 1B0\n");
  const auto expect_refused = [&](const std::string& arguments, const char* words) {
    const auto ended = scratch.bonfire("train a.toml " + arguments);
    EXPECT_EQ(ended.code, 2) << arguments << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_NE(ended.err.find(words), std::string::npos) << words << " is not in: " << ended.err;
    EXPECT_FALSE(std::filesystem::exists(scratch.path() / "runs")) << "something was started";
  };
  expect_refused("--ranks 16 --set layout.pipeline=16", "16 stages for a model of 8 Units");
  expect_refused("--ranks 3 --set layout.pipeline=3 --set layout.schedule=interleaved --set layout.chunks=2",
                 "8 microbatches on 3 ranks; allowed: a multiple of the ranks, such as 6 or 9");
  expect_refused("--ranks 2 --set layout.pipeline=2 --set layout.schedule=mine.txt --set train.microbatch=16",
                 "the send '1SB0' is missing");
  expect_refused("--ranks 2 --set layout.pipeline=2 --set layout.stages=[3,4]", "the model has 8");
  for (const char* key : {"layout.wrap=all", "layout.wrap_types=[\"block\"]", "layout.ignore=[\"head\"]"})
    expect_refused(std::string("--ranks 2 --set layout.pipeline=2 --set '") + key + "'",
                   "the memory of a pipeline is predicted for sharded Units as the model has them; allowed with: "
                   "layout.pipeline = 1");
}

}  // namespace
}  // namespace bonfire::pipeline_test
