// PipeDream through the command: from profile to partition to training, every rank a process.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

namespace bonfire::pipedream_test {
namespace {

using nlohmann::json;
using testing::Scratch;

constexpr const char* model =
    "[run]\nname = \"a\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 64\nlayers = 4\nheads = 4\nffn = 192\n"
    "vocab = 512\ntied = false\n[data]\nsequence = 32\n[train]\nsteps = 12\nbatch = 4\nmicrobatch = 2\n"
    "[checkpoint]\nevery = 0\n";

std::vector<json> lines(const Scratch& scratch, const std::string& file) {
  std::vector<json> all;
  std::istringstream in(scratch.read(file));
  for (std::string line; std::getline(in, line);) all.push_back(json::parse(line));
  return all;
}

TEST(PipeDream, FromProfileToPartitionToTraining) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  auto ended = scratch.bonfire("profile a.toml --repeats 2 -o p.json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto profile = json::parse(scratch.read("p.json"));
  EXPECT_EQ(profile.at("batch"), 4);
  ASSERT_EQ(profile.at("units").size(), 6u);
  for (const auto& unit : profile.at("units")) {
    EXPECT_GT(unit.at("forward_ms").get<double>(), 0) << unit;
    EXPECT_GT(unit.at("parameter_bytes").get<double>(), 0) << unit;
    EXPECT_GT(unit.at("saved_bytes").get<double>(), 0) << unit;
  }
  // Two microbatches of two samples of 32 tokens, 64 numbers each.
  EXPECT_EQ(profile.at("units")[1].at("output_bytes"), 4 * 32 * 64 * 4);
  EXPECT_EQ(profile.at("units")[5].at("output_bytes"), 0);

  ended = scratch.bonfire("partition p.json --cluster 3@1e9 --for a.toml --json -o layout.toml");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto partition = json::parse(ended.out);
  int ranks = 0, units = 0;
  for (const auto& stage : partition.at("stages")) {
    EXPECT_EQ(stage.at("first"), units);
    units = stage.at("last").get<int>() + 1;
    ranks += stage.at("replicas").get<int>();
  }
  EXPECT_EQ(units, 6);
  EXPECT_EQ(ranks, 3);
  EXPECT_GT(partition.at("minibatch_ms").get<double>(), 0);
  EXPECT_GE(partition.at("in_flight").get<int>(), 1);
  // What it has written is what runs.
  scratch.write("b.toml", std::string(model) + scratch.read("layout.toml"));
  ended = scratch.bonfire("train b.toml --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(json::parse(ended.out).at("steps"), 12);

  ended = scratch.bonfire("profile a.toml --set model.layers=5 --repeats 1 -o q.json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  ended = scratch.bonfire("partition q.json --cluster 3@1e9 --for a.toml");
  EXPECT_EQ(ended.code, 2);
  EXPECT_NE(ended.err.find("profile 'q.json' is of model 'llama, 7 Units"), std::string::npos) << ended.err;
}

TEST(PipeDream, TrainsInEveryMode) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  struct Mode {
    const char* schedule;
    double staleness;  // of a full pipeline of three stages
  };
  for (const auto& [schedule, stale] :
       {Mode{"pipedream", 2}, {"pipedream-vertical", 2}, {"pipedream-2bw", 1}, {"pipedream-flush", 0}}) {
    SCOPED_TRACE(schedule);
    const auto ended =
        scratch.bonfire(std::string("train a.toml --json --set train.batch=12 --set layout.pipeline=3 --set run.name=") +
                        schedule + " --set train.eval_every=6 --set layout.schedule=" + schedule);
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto report = json::parse(ended.out);
    EXPECT_EQ(report.at("steps"), 12);
    EXPECT_EQ(report.at("drains"), 2);
    const auto metrics = lines(scratch, std::string("runs/") + schedule + "/metrics.jsonl");
    ASSERT_EQ(metrics.size(), 12u);
    double most = 0;
    for (std::size_t at = 0; at < metrics.size(); ++at) {
      EXPECT_EQ(metrics[at].at("step"), at + 1);
      EXPECT_GT(metrics[at].at("grad_norm").get<double>(), 0);
      most = std::max(most, metrics[at].at("staleness").get<double>());
      EXPECT_EQ(metrics[at].contains("eval_loss"), at % 6 == 5);
    }
    EXPECT_EQ(most, stale);
    // The pipeline fills.
    EXPECT_EQ(metrics.front().at("staleness"), 0);
    EXPECT_EQ(report.at("staleness")[0], stale);
    EXPECT_EQ(report.at("loss_last"), metrics.back().at("loss"));
  }
}

// With a flush before every update the order of microbatches is all that is left of a pipeline.
TEST(PipeDream, WithFlushIsTheSameAsOneRank) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  const auto ended = scratch.bonfire(
      "train a.toml --set train.batch=12 --set run.name=flush --set layout.pipeline=2 --set 'layout.replicas=[2,1]' "
      "--set layout.schedule=pipedream-flush --set train.clip=0 --set optimizer.type=sgd");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto plain = scratch.bonfire(
      "train a.toml --ranks 1 --set train.batch=12 --set run.name=plain --set train.clip=0 --set optimizer.type=sgd");
  ASSERT_EQ(plain.code, 0) << plain.err;
  const auto a = lines(scratch, "runs/flush/metrics.jsonl"), b = lines(scratch, "runs/plain/metrics.jsonl");
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t at = 0; at < a.size(); ++at) {
    EXPECT_NEAR(a[at].at("loss").get<double>(), b[at].at("loss").get<double>(), 1e-5 * b[at].at("loss").get<double>());
    EXPECT_NEAR(a[at].at("grad_norm").get<double>(), b[at].at("grad_norm").get<double>(), 1e-4);
  }
}

// A run that is saved, where it drains, and goes on from there.
TEST(PipeDream, ResumesWhereItDrained) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  const std::string keys =
      " --json --set layout.pipeline=2 --set 'layout.replicas=[2,1]' --set layout.schedule=pipedream --set "
      "checkpoint.every=6 --set run.name=";
  auto ended = scratch.bonfire("train a.toml" + keys + "whole");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto whole = json::parse(ended.out);
  ended = scratch.bonfire("train a.toml" + keys + "rest --resume runs/whole/checkpoints/step-00000006");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto rest = json::parse(ended.out);
  EXPECT_EQ(rest.at("loss_last"), whole.at("loss_last"));
  ended = scratch.bonfire("checkpoint diff runs/whole/checkpoints/step-00000012 runs/rest/checkpoints/step-00000012");
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
}

// A rank is killed, with saves behind it and perhaps one on its way; the ranks that are started again go on from the newest
// that is complete.
TEST(PipeDream, ResumesFromASaveWithoutADrainAfterAKill) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  // By its folder the run is told from any other on this machine.
  const auto keys =
      " --json --set model.dim=16 --set model.ffn=32 --set data.sequence=8 --set train.steps=1200 --set "
      "layout.pipeline=2 --set 'layout.replicas=[2,1]' --set layout.schedule=pipedream --set checkpoint.every=20 "
      "--set checkpoint.keep=0 --set checkpoint.drain=false --set run.folder=" +
      (scratch.path() / "runs").string();
  // The ranks' own words have no --ranks; those of this shell have brackets.
  const auto killed = testing::run_shell(
      fmt::format("cd {0}\n"
                  "timeout 120 {1}/bonfire train a.toml --ranks 3 {2} --max-restarts 1 >out.txt 2>err.txt &\n"
                  "until [ -e runs/a/checkpoints/latest ]; do kill -0 $! || exit 7; sleep 0.02; done\n"
                  "kill -KILL $(pgrep -n -f '[r]un.folder={0}/runs') || exit 8\n"
                  "wait $!\n",
                  scratch.path().string(), BONFIRE_BUILD_DIR, keys));
  ASSERT_EQ(killed.code, 0) << killed.output << scratch.read("err.txt");
  const auto report = json::parse(scratch.read("out.txt"));
  const auto step = report.at("resumed_after").get<int>();
  EXPECT_EQ(step % 20, 0);
  EXPECT_GT(step, 0);
  EXPECT_EQ(report.at("drains"), 1);
  const auto rest = scratch.bonfire(
      fmt::format("train a.toml --ranks 3 {} --set run.name=rest --resume runs/a/checkpoints/step-{:08}", keys, step));
  ASSERT_EQ(rest.code, 0) << rest.err;
  const auto same = scratch.bonfire("checkpoint diff runs/a runs/rest");
  EXPECT_EQ(same.code, 0) << same.out << same.err;
}

TEST(PipeDream, TheWholePeakIsPredicted) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  for (const char* layout :
       {"--set layout.pipeline=2 --set layout.schedule=pipedream", "--set layout.pipeline=3 --set layout.schedule=pipedream",
        "--set layout.pipeline=3 --set layout.schedule=pipedream-vertical",
        "--set layout.pipeline=2 --set layout.schedule=pipedream-2bw --set train.batch=8",
        "--set layout.pipeline=2 --set layout.schedule=pipedream-flush --set train.batch=8",
        "--set layout.pipeline=3 --set layout.schedule=pipedream --set checkpoint.every=4 --set checkpoint.drain=false",
        "--set layout.pipeline=2 --set 'layout.replicas=[2,1]' --set layout.schedule=pipedream"}) {
    const auto ended = scratch.bonfire(std::string("train a.toml --json ") + layout);
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto report = json::parse(ended.out);
    const double measured = report.at("peak_memory_bytes").get<double>();
    EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, 0.05 * measured) << layout;
  }
}

TEST(PipeDream, WithoutStashingTheSummarySaysSo) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  const auto ended =
      scratch.bonfire("train a.toml --set layout.pipeline=2 --set layout.schedule=pipedream --set layout.stash=false");
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE((ended.out + ended.err).find("they are not the gradients of any weights"), std::string::npos)
      << ended.out << ended.err;
}

TEST(PipeDream, RecomputedBlocksHaveTheSameUpdates) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  json kept;
  for (const char* recompute : {"none", "full", "selective"}) {
    const auto ended = scratch.bonfire(std::string("train a.toml --json --set layout.pipeline=2 --set "
                                                   "layout.schedule=pipedream-vertical --set layout.recompute=") +
                                       recompute);
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto report = json::parse(ended.out);
    if (kept.is_null()) kept = report;
    EXPECT_EQ(report.at("loss_last"), kept.at("loss_last")) << recompute;
    if (std::string(recompute) == "full") {
      EXPECT_LT(report.at("peak_memory_bytes"), kept.at("peak_memory_bytes"));
    }
  }
}

TEST(PipeDream, WhatCannotBeIsOneLineAndNothingStarts) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  const auto expect_refused = [&](const std::string& arguments, const char* words) {
    const auto ended = scratch.bonfire("train a.toml " + arguments);
    EXPECT_EQ(ended.code, 2) << arguments << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_NE(ended.err.find(words), std::string::npos) << words << " is not in: " << ended.err;
    EXPECT_FALSE(std::filesystem::exists(scratch.path() / "runs")) << "something was started";
  };
  const std::string two = "--set layout.pipeline=2 --set layout.schedule=pipedream ";
  expect_refused("--set layout.pipeline=2 --set layout.schedule=pipedram", "no schedule has this name");
  expect_refused("--set layout.pipeline=2 --set 'layout.replicas=[2,1]'", "has one rank for each stage of a pipeline");
  expect_refused("--set layout.pipeline=2 --set layout.stash=false", "has no versions to stash");
  expect_refused(two + "--set 'layout.replicas=[2,1,1]'", "replicas of 3 stages, and layout.pipeline = 2");
  expect_refused(two + "--set 'layout.replicas=[2,1]' --ranks 4", "3 ranks in all, but there are 4");
  expect_refused(two + "--set 'layout.replicas=[5,1]'", "a multiple of 5");
  expect_refused(two + "--set layout.shard=2", "layout.replicas says how many do; allowed: 1");
  expect_refused(two + "--set layout.replicate=2", "layout.replicas says how many do; allowed: 1");
  expect_refused(two + "--set model.tied=true", "updated at different times");
  expect_refused(two + "--set train.precision=fp16", "allowed with it: fp32 | bf16");
  expect_refused(two + "--set train.nan_policy=skip", "allowed with it: stop");
  expect_refused("--set layout.pipeline=2 --set checkpoint.drain=false", "there is nothing to drain; allowed with: layout.");
  expect_refused(two + "--set layout.stages=measured", "takes stages from bonfire partition");
  expect_refused("--set layout.pipeline=3 --set layout.schedule=pipedream-2bw --set train.microbatch=4",
                 "allowed: more microbatches in a minibatch");
  expect_refused("--set layout.pipeline=2 --set layout.schedule=pipedream-vertical --set layout.stash=false",
                 "without stashing there are none to hold");
}

}  // namespace
}  // namespace bonfire::pipedream_test
