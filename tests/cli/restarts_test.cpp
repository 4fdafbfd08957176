// Runs whose ranks are killed, or asked to stop, by whoever has started them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/support/port.h"
#include "tests/support/thrown.h"

namespace bonfire::restarts_test {
namespace {

namespace fs = std::filesystem;
using testing::expect_part;
using testing::Port;
using testing::run_shell;
using testing::Said;
using testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = "
    "2\nffn = 32\nvocab = 32\n[data]\nsequence = 8\n[train]\nsteps = 2000\nbatch = 12\n[optimizer]\ndecay = "
    "\"constant\"\nwarmup = 1\n[checkpoint]\nevery = 50\n";

class Restarts : public ::testing::Test {
 protected:
  Restarts() {
    scratch_.write("a.toml", tiny);
    // Processes of this run are told from any other's by its folder.
    scratch_.write(
        "functions.sh",
        fmt::format(
            "run_train() {{ exec timeout 300 {0}/bonfire train a.toml --set run.folder={1}/runs \"$@\"; }}\n"
            "train() {{ (run_train \"$@\"); }}\n"
            "until_there() {{ until [ -e $1 ]; do [ $SECONDS -lt 250 ] || exit 9; sleep 0.02; done; }}\n"
            "until_still() {{ local BEFORE=none; until [ \"$(wc -c < $1)\" = \"$BEFORE\" ]; do BEFORE=$(wc -c < $1); "
            "[ $SECONDS -lt 250 ] || exit 9; sleep 0.3; done; }}\n"
            "is_rank() {{ grep -qz '^RANK=' /proc/$1/environ 2>/dev/null; }}\n",
            BONFIRE_BUILD_DIR, scratch_.path().string()));
  }
  Said shell(const std::string& lines) const {
    scratch_.write("script.sh", ". ./functions.sh\n" + lines);
    return run_shell(fmt::format("cd {} && bash script.sh", scratch_.path().string()));
  }
  void trained(const std::string& more) const {
    const auto said = shell("train " + more);
    ASSERT_EQ(said.code, 0) << said.output;
  }
  std::vector<nlohmann::json> metrics(const std::string& run) const {
    std::vector<nlohmann::json> lines;
    std::ifstream in(scratch_.path() / "runs" / run / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  // The same weights, the same losses, so the same samples, and each step once.
  void expect_same(const std::string& run, const std::string& undisturbed) const {
    const auto same = scratch_.bonfire(fmt::format("checkpoint diff runs/{} runs/{}", run, undisturbed));
    EXPECT_EQ(same.code, 0) << same.out << same.err;
    const auto own = metrics(run), expected = metrics(undisturbed);
    ASSERT_EQ(own.size(), expected.size());
    for (std::size_t at = 0; at < own.size(); ++at) {
      EXPECT_EQ(own[at].at("step"), at + 1);
      ASSERT_EQ(own[at].at("loss"), expected[at].at("loss")) << at;
    }
  }

  const Scratch scratch_;
};

// Kills of ranks at moments that nobody chose: BONFIRE_KILLS in all, three in each run. A rank that dies while the run
// starts again counts as well.
TEST_F(Restarts, RanksThatAreKilledAtAnyMomentChangeNothing) {
  const char* asked = std::getenv("BONFIRE_KILLS");
  const int kills = asked ? std::atoi(asked) : 3;
  trained("--ranks 2 --set run.name=whole --json >whole.json");
  for (int run = 0; 3 * run < kills; ++run) {
    const auto said = shell(
        fmt::format("(run_train --ranks 2 --max-restarts 3 --set run.name=killed{0} >out{0}.txt 2>err{0}.txt) & RUN=$!\n"
                    "KILLED=0\n"
                    "while [ $KILLED -lt 3 ] && kill -0 $RUN 2>/dev/null; do\n"
                    "  sleep $((RANDOM % 2)).$((RANDOM % 10))\n"
                    "  for LAUNCHER in $(pgrep -P $RUN); do\n"
                    "    for RANK in $(pgrep -P $LAUNCHER | shuf); do\n"
                    "      is_rank $RANK && kill -KILL $RANK && KILLED=$((KILLED + 1)) && break\n"
                    "    done\n"
                    "  done\n"
                    "done\n"
                    "wait $RUN; CODE=$?\n"
                    "echo $KILLED killed\n"
                    "exit $CODE\n",
                    run));
    const auto words = scratch_.read(fmt::format("err{}.txt", run));
    ASSERT_EQ(said.code, 0) << said.output << words.substr(0, 4000);
    EXPECT_EQ(said.output.find("0 killed"), std::string::npos) << said.output;
    expect_part(words, "starting all ranks again");
    expect_same(fmt::format("killed{}", run), "whole");
    if (asked) fmt::print("run {}: {}", run, said.output);
  }
}

// Slurm sends --signal=USR1@60 to each process of a step; there is no launcher of ours.
TEST_F(Restarts, SlurmsSignalToEachProcessSavesAndARequeuedJobGoesOn) {
  const Port port;
  const auto step = [&](int restarts, const std::string& steps) {
    return fmt::format(
        "task() {{ export SLURM_PROCID=$1 SLURM_NTASKS=2 SLURM_LOCALID=$1 SLURM_NODEID=0 SLURM_NTASKS_PER_NODE=2 "
        "SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=localhost MASTER_ADDR=127.0.0.1 MASTER_PORT={} SLURM_RESTART_COUNT={} "
        "BONFIRE_TOKEN=secret; exec timeout -k 1 120 {}/bonfire train a.toml --set run.folder={}/runs --set train.steps={} "
        "2>>task$1.txt; }}\n"
        "(task 0) & A=$!\n(task 1) & B=$!\n",
        port.number(), restarts, BONFIRE_BUILD_DIR, scratch_.path().string(), steps);
  };
  const auto stopped = shell(step(0, "1000000") +
                             "until_there runs/tiny/checkpoints/latest\n"
                             "kill -USR1 $(pgrep -P $A) $(pgrep -P $B)\n"
                             "wait $A; echo first $?\nwait $B; echo second $?\n");
  expect_part(stopped.output, "first 3\nsecond 3\n");
  expect_part(scratch_.read("task0.txt"), "stopped on request after step ");
  const auto saved = metrics("tiny").size();
  EXPECT_EQ(scratch_.read("runs/tiny/checkpoints/latest"), fmt::format("step-{:08}\n", saved));
  const auto rest = shell(step(1, std::to_string(saved + 7)) + "wait $A && wait $B\n");
  EXPECT_EQ(rest.code, 0) << rest.output << scratch_.read("task0.txt");
  expect_part(scratch_.read("task0.txt"), fmt::format("resumed after step {} from", saved));
  EXPECT_EQ(metrics("tiny").size(), saved + 7);
  EXPECT_FALSE(fs::exists(scratch_.path() / "runs/tiny-2"));
}

// As torchrun starts ranks again, in processes of their own.
TEST_F(Restarts, UnderAnotherLauncherTheNewestFolderGoesOn) {
  const Port port;
  const auto attempt = [&](int restarts) {
    return fmt::format(
        "rank() {{ export RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} "
        "TORCHELASTIC_RESTART_COUNT={} TORCHELASTIC_RUN_ID=one BONFIRE_TOKEN=secret; exec timeout -k 1 120 {}/bonfire train "
        "a.toml --set run.folder={}/runs 2>>rank$1.txt; }}\n"
        "(rank 0) & A=$!\n(rank 1) & B=$!\n",
        port.number(), restarts, BONFIRE_BUILD_DIR, scratch_.path().string());
  };
  trained("--ranks 2 --set run.name=whole");
  const auto died = shell(attempt(0) +
                          "until_there runs/tiny/checkpoints/latest\n"
                          "kill -KILL $(pgrep -P $B)\nwait $A; echo code $?\n");
  expect_part(died.output, "code 1");
  const auto rest = shell(attempt(1) + "wait $A && wait $B\n");
  EXPECT_EQ(rest.code, 0) << rest.output << scratch_.read("rank0.txt");
  expect_part(scratch_.read("rank0.txt"), "resumed after step ");
  EXPECT_FALSE(fs::exists(scratch_.path() / "runs/tiny-2"));
  expect_same("tiny", "whole");
}

// Ranks that died before they had a folder: an older run of the same name is not theirs. And what is theirs they go on with
// only where nothing has changed that may not.
TEST_F(Restarts, OnlyTheFolderOfTheSameLaunchGoesOn) {
  const Port port;
  const auto attempt = [&](const char* run, int restarts, const std::string& more) {
    return shell(fmt::format(
        "rank() {{ export RANK=$1 WORLD_SIZE=2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} "
        "TORCHELASTIC_RESTART_COUNT={} TORCHELASTIC_RUN_ID={} BONFIRE_TOKEN=secret; exec timeout -k 1 120 {}/bonfire train "
        "a.toml --set run.folder={}/runs --set train.steps=60 {} 2>rank$1.txt; }}\n"
        "(rank 0) & A=$!\n(rank 1) & B=$!\nwait $A; A=$?; wait $B; echo codes $A $?\n",
        port.number(), restarts, run, BONFIRE_BUILD_DIR, scratch_.path().string(), more));
  };
  trained("--ranks 2 --set train.steps=60");
  expect_part(attempt("two", 1, "").output, "codes 0 0");
  EXPECT_EQ(scratch_.read("rank0.txt").find("resumed after"), std::string::npos);
  EXPECT_EQ(metrics("tiny-2").size(), 60u);
  expect_part(attempt("two", 2, "--set train.seed=5").output, "codes 2 2");
  expect_part(scratch_.read("rank0.txt"), "train.seed = 5: the run that is resumed has 1");
  // One that had come to its end has nothing left to do.
  expect_part(attempt("two", 2, "").output, "codes 0 0");
  EXPECT_FALSE(fs::exists(scratch_.path() / "runs/tiny-3"));
}

// Two nodes with a folder each of the same name: neither would ever have all of a checkpoint.
TEST_F(Restarts, AFolderThatOneNodeDoesNotSeeIsRefusedByName) {
  fs::create_directory(scratch_.path() / "runs");
  const Port port;
  const auto said = shell(fmt::format(
      "rank() {{ export RANK=$1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={} "
      "BONFIRE_TOKEN=secret; exec timeout -k 1 120 {}/bonfire train a.toml --set run.folder={}/runs 2>rank$1.txt; }}\n"
      "(rank 0) & A=$!\n"
      "unshare -m bash -c \"$(declare -f rank); mount -t tmpfs none runs || exit 77; rank 1\" & B=$!\n"
      "wait $B; SECOND=$?\n[ $SECOND = 77 ] && kill $A && exit 77\nwait $A; echo codes $? $SECOND\n",
      port.number(), BONFIRE_BUILD_DIR, scratch_.path().string()));
  if (said.code == 77 || said.output.find("unshare failed") != std::string::npos)
    GTEST_SKIP() << "nothing may be mounted here";
  expect_part(said.output, "codes 2 2");
  expect_part(scratch_.read("rank0.txt"), "runs/tiny/checkpoints': rank 1 (node 1) does not see what rank 0 writes there");
  // Nothing that looks as if it had been trained is left.
  EXPECT_FALSE(fs::exists(scratch_.path() / "runs/tiny/metrics.jsonl"));
}

// A launcher on each node, which all start their ranks again.
TEST_F(Restarts, OnSeveralNodesTheNewestFolderGoesOn) {
  trained("--ranks 2 --set run.name=whole");
  const Port port;
  const auto node = [&](int number) {
    return fmt::format(
        "(run_train --nodes 2 --node-rank {0} --master 127.0.0.1:{1} --ranks 1 --max-restarts 1 2>node{0}.txt) & N{0}=$!\n",
        number, port.number());
  };
  const auto said = shell("export BONFIRE_TOKEN=secret\n" + node(0) + node(1) +
                          "until_there runs/tiny/checkpoints/latest\n"
                          "for LAUNCHER in $(pgrep -P $N1); do for RANK in $(pgrep -P $LAUNCHER); do\n"
                          "is_rank $RANK && kill -KILL $RANK; done; done\n"
                          "wait $N0; A=$?; wait $N1; B=$?; echo codes $A $B\n");
  expect_part(said.output, "codes 0 0");
  expect_part(scratch_.read("node0.txt"), "resumed after step ");
  EXPECT_FALSE(fs::exists(scratch_.path() / "runs/tiny-2"));
  expect_same("tiny", "whole");
}

// A rank that cannot end its step, because another one stands still, does not stay for ever.
TEST_F(Restarts, ARunThatIsAskedToStopTakesNoLongerThanItsGrace) {
  const auto said = shell(
      "(run_train --ranks 2 --set checkpoint.grace=1 --set train.steps=1000000 2>err.txt) & RUN=$!\n"
      "until_there runs/tiny/checkpoints/latest\n"
      "LAUNCHER=$(pgrep -P $RUN)\n"
      // Again and again: where the launcher has noticed it, it wakes a stopped rank when the run is asked to stop.
      "for RANK in $(pgrep -P $LAUNCHER); do grep -qz '^RANK=1' /proc/$RANK/environ && "
      "{ while kill -STOP $RANK 2>/dev/null; do :; done & }; done\n"
      // Rank 0 is in a step that cannot end; at the end of one it would vote, and go on without rank 1's.
      "until_still runs/tiny/metrics.jsonl\n"
      "kill -TERM $LAUNCHER\n"
      "wait $RUN; echo code $?\n");
  expect_part(said.output, "code 1");
  expect_part(scratch_.read("err.txt"), "rank 0 was asked to stop 1 s ago and has not ended its step and saved");
  expect_part(scratch_.read("err.txt"), "checkpoint.grace = 1");
  EXPECT_EQ(scratch_.bonfire("checkpoint verify runs/tiny").code, 0);
}

// One rank asks for more memory than there is: it is named with what was predicted, the others end, and the last checkpoint
// serves.
TEST_F(Restarts, ARankWithoutMemoryEndsTheRunWhichCanGoOn) {
  const auto failed = shell(
      "train --ranks 3 --set fault.memory_step=120 --set fault.memory_rank=1 2>err.txt; echo code $?; pgrep -f $PWD/runs");
  EXPECT_EQ(failed.output, "code 1\n");  // and no rank is left
  const auto words = scratch_.read("err.txt");
  expect_part(words, "rank 1");
  expect_part(words, "out of memory: ");
  expect_part(words, "was predicted to need");
  EXPECT_EQ(scratch_.read("runs/tiny/checkpoints/latest"), "step-00000100\n");
  trained("--ranks 3 --resume latest --set train.steps=130");
  EXPECT_EQ(metrics("tiny").size(), 130u);
}

}  // namespace
}  // namespace bonfire::restarts_test
