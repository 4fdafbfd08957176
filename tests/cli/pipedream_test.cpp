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
  const auto expect_refused = [&](const std::string& arguments, const char* words) {
    const auto refused = scratch.bonfire("partition " + arguments);
    EXPECT_EQ(refused.code, 2) << arguments;
    EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
    EXPECT_NE(refused.err.find(words), std::string::npos) << refused.err;
  };
  expect_refused("q.json --cluster 3@1e9 --for a.toml", "profile 'q.json' is of model 'llama, 7 Units");
  // As many Units and parameters, but not the same.
  scratch.write("again.toml", std::string(model) + "[layout]\nrecompute = \"full\"\n");
  expect_refused("p.json --cluster 3@1e9 --for again.toml", "profile 'p.json' is of model");
  auto other = std::string(model);
  other.replace(other.find("heads = 4"), 9, "heads = 8");
  scratch.write("heads.toml", other);
  expect_refused("p.json --cluster 3@1e9 --for heads.toml", "profile 'p.json' is of model");
  other = model;
  other.replace(other.find("\nbatch = 4"), 10, "\nbatch = 8");
  scratch.write("batch.toml", other);
  expect_refused("p.json --cluster 3@1e9 --for batch.toml", "profile 'p.json' is of batch '4', and batch.toml has '8'");
  other = model;
  other.replace(other.find("microbatch = 2"), 14, "microbatch = 1");
  scratch.write("micro.toml", other);
  expect_refused("p.json --cluster 3@1e9 --for micro.toml", "is of microbatches '2'");
  auto elsewhere = profile;
  elsewhere["device"] = "NVIDIA of old";
  scratch.write("elsewhere.json", elsewhere.dump());
  expect_refused("elsewhere.json --cluster 3@1e9 --for a.toml", "is of device 'NVIDIA of old', and a.toml has 'cpu'");
}

// What is made again is not kept, and what is frozen has no gradients.
TEST(PipeDream, AProfileIsOfTheUnitsThatWillRun) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  const auto profile = [&](const std::string& more) {
    const auto ended = scratch.bonfire("profile a.toml --repeats 1 --json " + more);
    EXPECT_EQ(ended.code, 0) << ended.err;
    return json::parse(ended.out).at("units");
  };
  const auto plain = profile(""), again = profile("--set layout.recompute=full"),
             frozen = profile("--set 'train.freeze=[\"blocks.0\"]'");
  for (std::size_t unit = 1; unit < 5; ++unit)
    EXPECT_LT(again[unit].at("saved_bytes").get<double>(), 0.5 * plain[unit].at("saved_bytes").get<double>()) << unit;
  EXPECT_EQ(frozen[1].at("state_bytes"), 0);
  EXPECT_EQ(frozen[2].at("state_bytes"), plain[2].at("state_bytes"));
}

// With keys that have no more than what the partitioner wrote and a model, all others are as they are by default.
TEST(PipeDream, WhatThePartitionerWritesRunsByDefault) {
  const Scratch scratch;
  json profile{{"model", "m"}, {"batch", 4}, {"microbatch", 2}, {"device", "cpu"}, {"units", json::array()}};
  for (int unit = 0; unit < 6; ++unit)
    profile["units"].push_back({{"name", std::to_string(unit)},
                                {"forward_ms", unit < 5 ? 0.2 : 0.33},
                                {"backward_ms", unit < 5 ? 0.4 : 0.67},
                                {"forward_spread_ms", 0},
                                {"backward_spread_ms", 0},
                                {"output_bytes", 100},
                                // The last one is not worth averaging.
                                {"parameter_bytes", unit < 5 ? 0 : 1000000},
                                {"state_bytes", 0},
                                {"saved_bytes", 0}});
  scratch.write("p.json", profile.dump());
  auto ended = scratch.bonfire("partition p.json --cluster 4@1e9 -o layout.toml");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto keys = scratch.read("layout.toml");
  EXPECT_NE(keys.find("# train.steps, train.eval_every and checkpoint.every: multiples of 3"), std::string::npos) << keys;
  EXPECT_NE(keys.find("stages = [5, 1]\nreplicas = [3, 1]\n"), std::string::npos) << keys;
  scratch.write("b.toml",
                "[run]\nname = \"b\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 4\nheads = 2\nffn = "
                "24\nvocab = 64\ntied = false\n[data]\nsequence = 8\n[train]\nbatch = 4\nmicrobatch = 2\n" +
                    keys);
  ended = scratch.bonfire("train b.toml --json");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto report = json::parse(ended.out);
  EXPECT_EQ(report.at("steps"), 201);
  EXPECT_EQ(report.at("staleness"), json({1, 0}));
  EXPECT_TRUE(std::filesystem::exists(scratch.path() / "runs/b/checkpoints/step-00000201"));
}

// docs/pipedream.md has the formulas; what a run says that it was predicted to need is the largest.
TEST(PipeDream, ThePlanStatesVersionsAndMemoryBesideDataParallelism) {
  const Scratch scratch;
  scratch.write("a.toml", model);
  // Embedding and two blocks; two blocks and the head.
  const double block = 4 * (2 * 64 + 4 * 64 * 64 + 3 * 64 * 192), table = 4 * 512 * 64;
  const double bytes[] = {table + 2 * block, 2 * block + table + 4 * 64};
  struct Mode {
    const char* schedule;
    int batch;
    std::vector<int> in_flight, versions;  // with replicas 2-1
  };
  for (const auto& [schedule, batch, in_flight, versions] :
       {Mode{"pipedream", 4, {2, 1}, {2, 1}}, Mode{"pipedream-vertical", 4, {2, 1}, {2, 4}},
        Mode{"pipedream-2bw", 12, {2, 1}, {2, 2}}, Mode{"pipedream-flush", 12, {2, 1}, {1, 1}}}) {
    SCOPED_TRACE(schedule);
    const auto keys = std::string(" a.toml --set layout.pipeline=2 --set 'layout.replicas=[2,1]' --set layout.schedule=") +
                      schedule + " --set train.batch=" + std::to_string(batch);
    auto ended = scratch.bonfire("plan --memory --json" + keys);
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto plan = json::parse(ended.out);
    ASSERT_EQ(plan.at("stages").size(), 2u);
    double most = 0;
    for (std::size_t at = 0; at < 2; ++at) {
      const auto& stage = plan.at("stages")[at];
      EXPECT_EQ(stage.at("replicas"), at == 0 ? 2 : 1);
      EXPECT_EQ(stage.at("in_flight"), in_flight[at]);
      EXPECT_EQ(stage.at("versions"), versions[at]) << at;
      // Where there are several, what updates change lies apart.
      const int copies = versions[at] + (versions[at] > 1 ? 1 : 0);
      EXPECT_NEAR(stage.at("weights_bytes").get<double>(), copies * bytes[at], 0.002 * copies * bytes[at]);
      EXPECT_NEAR(stage.at("gradient_bytes").get<double>(), bytes[at], 0.002 * bytes[at]);
      EXPECT_NEAR(stage.at("optimizer_bytes").get<double>(), 2 * bytes[at], 0.004 * bytes[at]);
      EXPECT_GT(stage.at("activation_bytes").get<double>(), 0);
      most = std::max(most, stage.at("memory_bytes").get<double>());
    }
    EXPECT_EQ(plan.at("memory_bytes"), most);
    ended = scratch.bonfire("train --json --set train.steps=2" + keys);
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(json::parse(ended.out).at("predicted_memory_bytes"), most);
    // Beside it, as it says of itself.
    const auto& beside = plan.at("data_parallel");
    EXPECT_EQ(beside.at("ranks"), 3);
    EXPECT_EQ(beside.at("batch"), batch == 4 ? 6 : 12);
    ended = scratch.bonfire("plan --memory --json a.toml --set layout.replicate=3 --set train.batch=" +
                            std::to_string(beside.at("batch").get<int>()));
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(json::parse(ended.out).at("memory_bytes"), beside.at("memory_bytes"));
    ended = scratch.bonfire("plan --memory" + keys);
    EXPECT_NE(ended.out.find(std::string(schedule) + " on 3 ranks, replicas 2-1"), std::string::npos) << ended.out;
    EXPECT_NE(ended.out.find("Data parallelism on 3 ranks"), std::string::npos) << ended.out;
  }
  for (const char* option : {"--gpus 4", "--cap 1"}) {
    const auto ended = scratch.bonfire(std::string("plan a.toml --memory --set layout.pipeline=2 --set "
                                                   "layout.schedule=pipedream ") +
                                       option);
    EXPECT_EQ(ended.code, 2);
    EXPECT_NE(ended.err.find("allowed: neither --gpus nor --cap"), std::string::npos) << ended.err;
  }
  // A stage without anything to train has one version, and no masters.
  const auto ended = scratch.bonfire(
      "plan a.toml --memory --json --set layout.pipeline=2 --set layout.schedule=pipedream --set "
      "'train.freeze=[\"embedding\",\"blocks.0\",\"blocks.1\"]'");
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto frozen = json::parse(ended.out).at("stages")[0];
  EXPECT_EQ(frozen.at("versions"), 1);
  EXPECT_NEAR(frozen.at("weights_bytes").get<double>(), bytes[0], 0.002 * bytes[0]);
  EXPECT_EQ(frozen.at("gradient_bytes"), 0);
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
        "--set layout.pipeline=2 --set 'layout.replicas=[2,1]' --set layout.schedule=pipedream",
        "--set layout.pipeline=2 --set layout.schedule=pipedream --set 'train.freeze=[\"embedding\",\"blocks.0\"]'",
        "--set layout.pipeline=2 --set layout.schedule=pipedream-vertical --set train.precision=bf16"}) {
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
  for (const char* words : {"they are not the gradients of any weights", " a step (mean)", "emptying the pipeline took"})
    EXPECT_NE((ended.out + ended.err).find(words), std::string::npos) << words << ended.out << ended.err;
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
