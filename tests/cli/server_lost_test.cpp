// Workers and servers that are killed while the command trains with parameter servers.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/support/port.h"
#include "tests/support/thrown.h"

namespace bonfire::server_lost_test {
namespace {

using testing::expect_part;
using testing::Port;
using testing::run_shell;
using testing::Said;
using testing::Scratch;

constexpr int steps = 600, batch = 12, workers = 2;

constexpr const char* tiny =
    "[run]\nname = \"whole\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 2\nheads = 4\nkv_heads = 2\n"
    "ffn = 32\nvocab = 37\n[data]\nsequence = 8\n[train]\nsteps = 600\nbatch = 12\nmicrobatch = 2\nclip = 0.5\n[optimizer]\n"
    "warmup = 2\ndecay = \"constant\"\n[layout]\nserver = 1\nreplicate = 2\n[checkpoint]\nevery = 20\n";

class ServerLost : public ::testing::Test {
 protected:
  ServerLost() {
    scratch_.write("a.toml", tiny);
    // Processes of a run are told from any other's by who has started them.
    scratch_.write(
        "functions.sh",
        fmt::format("train() {{ exec timeout 120 {}/bonfire train a.toml \"$@\"; }}\n"
                    "until_there() {{ until [ -e $1 ] || ! kill -0 $RUN 2>/dev/null; do sleep 0.02; done; }}\n"
                    "processes() {{ for P in $(pgrep -P $1); do echo $P; processes $P; done; }}\n"
                    "rank() {{ for P in $(processes $RUN); do grep -qz \"^RANK=$1$\" /proc/$P/environ 2>/dev/null "
                    "&& echo $P; done | head -1; }}\n",
                    BONFIRE_BUILD_DIR));
  }
  Said shell(const std::string& lines) const {
    scratch_.write("script.sh", ". ./functions.sh\n" + lines);
    return run_shell(fmt::format("cd {} && bash script.sh", scratch_.path().string()));
  }
  // A run of which one rank is killed after its first checkpoint, at a moment that nobody chose.
  Said killed(const std::string& run, int rank, const std::string& more, const std::string& then = "") const {
    return shell(
        fmt::format("(train --set run.name={0} {1} >{0}.out 2>{0}.err) & RUN=$!\n"
                    "until_there runs/{0}/checkpoints/latest\n"
                    "sleep 0.$((RANDOM % 10))\n"
                    "kill -KILL $(rank {2})\n"
                    "{3}\n"
                    "wait $RUN; CODE=$?; cat {0}.err; exit $CODE\n",
                    run, more, rank, then));
  }
  // The folder of a run that nobody disturbed, the same for all tests.
  static std::string undisturbed() {
    static const Scratch scratch;
    static const int code = [] {
      scratch.write("a.toml", tiny);
      return scratch.bonfire("train a.toml").code;
    }();
    EXPECT_EQ(code, 0) << scratch.read("err.txt");
    return scratch / "runs/whole";
  }
  static std::vector<nlohmann::json> metrics(const std::string& folder) {
    std::vector<nlohmann::json> lines;
    std::ifstream in(folder + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  void expect_same_as_undisturbed(const std::string& run) const {
    const auto got = metrics(scratch_ / ("runs/" + run)), whole = metrics(undisturbed());
    ASSERT_EQ(got.size(), whole.size());
    for (std::size_t at = 0; at < got.size(); ++at) ASSERT_EQ(got[at].at("loss"), whole[at].at("loss")) << at;
    const auto same = scratch_.bonfire(fmt::format("checkpoint diff runs/{} {}", run, undisturbed()));
    EXPECT_EQ(same.code, 0) << same.out << same.err;
  }
  // The first step that is without the samples of the one that was lost, as the summary says it.
  void expect_lost_samples(const std::string& run, const std::string& said) const {
    const auto from = said.find("worker 1 (rank 2) was lost: its ");
    ASSERT_NE(from, std::string::npos) << said;
    int samples = 0, first = 0, last = 0, begin = 0, end = 0;
    ASSERT_EQ(
        std::sscanf(said.c_str() + from,
                    "worker 1 (rank 2) was lost: its %d samples of steps %d to %d are in no update: positions %d to %d",
                    &samples, &first, &last, &begin, &end),
        5)
        << said.substr(from);
    EXPECT_EQ(last, steps);
    EXPECT_EQ(samples, (last - first + 1) * batch / workers);
    EXPECT_EQ(begin, (first - 1) * batch + batch / workers);
    EXPECT_EQ(end, first * batch - 1);
    const auto got = metrics(scratch_ / ("runs/" + run)), whole = metrics(undisturbed());
    ASSERT_EQ(got.size(), whole.size());
    // Up to that step both workers' losses are averaged, and from it on worker 0's alone is there.
    for (int step = 1; step <= first; ++step) {
      const auto at = static_cast<std::size_t>(step - 1);
      if (step < first)
        ASSERT_EQ(got[at].at("loss"), whole[at].at("loss")) << step;
      else
        EXPECT_NE(got[at].at("loss"), whole[at].at("loss")) << step;
    }
  }

  const Scratch scratch_;
};

TEST_F(ServerLost, TheOthersGoOnWithoutAWorker) {
  const auto said = killed("dropped", 2, "--set layout.server_lost=drop");
  ASSERT_EQ(said.code, 0) << said.output;
  expect_part(said.output, "rank 2 was killed by SIGKILL (signal 9); the others go on without it");
  expect_lost_samples("dropped", said.output);
}

TEST_F(ServerLost, AWorkerThatIsWaitedForComesBackAlone) {
  const auto said = killed("back", 2, "--set layout.server_lost=wait");
  ASSERT_EQ(said.code, 0) << said.output;
  expect_part(said.output, "rank 2 was killed by SIGKILL (signal 9); the others wait, and it is started again alone (1 of ");
  EXPECT_EQ(said.output.find("starting all ranks again"), std::string::npos) << said.output;
  EXPECT_TRUE(std::filesystem::exists(scratch_.path() / "runs/back/logs/rank-2.return-1.log"));
  expect_same_as_undisturbed("back");
}

// Ranks of two nodes, whose launchers have no run folder to give to one that is back.
TEST_F(ServerLost, AWorkerOfAnotherNodeComesBack) {
  const Port port;
  const auto said =
      shell(fmt::format("node() {{ export BONFIRE_TOKEN=secret; train --nodes 3 --node-rank $1 --ranks 1 --master "
                        "127.0.0.1:{} --set run.name=nodes --set "
                        "layout.server_lost=wait 2>node$1.err; }}\n"
                        "(node 0) & FIRST=$!\n(node 1) & SECOND=$!\n(node 2) & RUN=$!\n"
                        "until_there runs/nodes/checkpoints/latest\n"
                        "kill -KILL $(rank 2)\n"
                        "wait $FIRST; A=$?; wait $SECOND; B=$?; wait $RUN; C=$?; cat node*.err; echo codes $A $B $C\n",
                        port.number()));
  expect_part(said.output, "codes 0 0 0");
  expect_part(said.output, "rank 2 was killed by SIGKILL (signal 9); the others wait");
  expect_same_as_undisturbed("nodes");
}

// The others cannot end their step without it.
TEST_F(ServerLost, ARequestToStopWaitsForAWorkerThatComesBack) {
  const auto said = killed("stopped", 2, "--set layout.server_lost=wait", "kill -TERM $(pgrep -P $RUN)");
  ASSERT_EQ(said.code, 3) << said.output;
  expect_part(said.output, "stopped on request after step");
  const auto rest = shell("(train --resume latest --set run.name=stopped --set layout.server_lost=wait 2>&1)");
  ASSERT_EQ(rest.code, 0) << rest.output;
  expect_same_as_undisturbed("stopped");
}

TEST_F(ServerLost, ARequestToStopDoesNotWaitForAWorkerThatIsGone) {
  const auto said = killed("stopped", 2, "--set layout.server_lost=drop --set train.steps=1000000",
                           "until grep -q 'go on without it' stopped.err; do sleep 0.02; done; kill -TERM $(pgrep -P $RUN)");
  ASSERT_EQ(said.code, 3) << said.output;
  expect_part(said.output, "stopped on request after step");
  expect_part(said.output, "worker 1 (rank 2) was lost");
}

TEST_F(ServerLost, AForeignLauncherCannotBearIt) {
  for (const char* policy : {"drop", "wait"}) {
    const auto refused =
        scratch_.bonfire(fmt::format("train a.toml --set layout.server_lost={}", policy),
                         "RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1");
    EXPECT_EQ(refused.code, 2) << refused.err;
    expect_part(refused.err, fmt::format("layout.server_lost = \"{}\"", policy));
    expect_part(refused.err, "torchrun has started this rank, and ends all of them when one fails; allowed here: stop");
  }
}

// Kills at moments that nobody chose: BONFIRE_KILLS of each kind of rank, with each policy. A server's end is that of the
// run, whatever the policy: all ranks go back to the newest checkpoint.
TEST_F(ServerLost, RanksThatAreKilledAtAnyMoment) {
  const char* asked = std::getenv("BONFIRE_KILLS");
  if (asked == nullptr) GTEST_SKIP() << "BONFIRE_KILLS is not set; the tests above kill one worker with each policy";
  for (const std::string policy : {"stop", "drop", "wait"})
    for (const int rank : {0, 2})
      for (int kill = 0; kill < std::atoi(asked); ++kill) {
        const auto run = fmt::format("{}-{}-{}", policy, rank, kill);
        SCOPED_TRACE(run);
        const auto said = killed(run, rank, fmt::format("--max-restarts 1 --set layout.server_lost={}", policy));
        ASSERT_EQ(said.code, 0) << said.output;
        expect_part(said.output, fmt::format("rank {} was killed by SIGKILL", rank));
        const bool all_again = rank == 0 || policy == "stop";
        EXPECT_EQ(said.output.find("starting all ranks again") != std::string::npos, all_again) << said.output;
        if (policy == "drop" && rank == 2)
          expect_lost_samples(run, said.output);
        else
          expect_same_as_undisturbed(run);
        fmt::print("{}: {}\n", run,
                   all_again          ? "all ranks started again, weights and losses equal"
                   : policy == "drop" ? said.output.substr(said.output.find("worker 1 (rank 2) was lost"),
                                                           said.output.find('\n', said.output.find("worker 1 (rank 2)")) -
                                                               said.output.find("worker 1 (rank 2) was lost"))
                                      : "the worker came back alone, weights and losses equal");
      }
}

}  // namespace
}  // namespace bonfire::server_lost_test
