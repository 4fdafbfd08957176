// Requests to stop that training, or a benchmark, hears whenever they come.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/base/random.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::training_signals_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;

// A training run that would take hours.
class Training : public ::testing::Test {
 protected:
  Training() {
    std::ofstream(folder_.path() + "/a.toml") << "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = "
                                                 "1\nheads = 2\nvocab = 32\n[data]\nsequence = 8\n[train]\nsteps = "
                                                 "100000000\nbatch = 4\n";
  }
  std::vector<std::string> train(std::vector<std::string> more) const {
    std::vector<std::string> words = {kBonfire, "train", folder_.path() + "/a.toml", "--set",
                                      "run.folder=" + folder_.path() + "/runs"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string metrics() const { return test::read_file(folder_.path() + "/runs/tiny/metrics.jsonl"); }
  void expect_steps() const {
    ASSERT_TRUE(test::eventually([&] { return contains(metrics(), "\n"); }, 60s));
  }
  void expect_stopped(Child& run) const {
    EXPECT_EQ(run.wait(30s), 3) << run.output();
    const std::string lines = metrics();
    const auto steps = std::count(lines.begin(), lines.end(), '\n');
    const std::string words = fmt::format("stopped on request after step {} of 100000000; continue with --resume ", steps);
    EXPECT_TRUE(contains(run.output(), words)) << steps << run.output();
    // The summary of what it did until then.
    const std::string checkpoint = fmt::format("{}/runs/tiny/checkpoints/step-{:08}", folder_.path(), steps);
    EXPECT_TRUE(contains(run.output(), "weights  " + checkpoint)) << run.output();
    EXPECT_TRUE(std::filesystem::exists(checkpoint + "/manifest.json")) << run.output();
    EXPECT_FALSE(contains(run.output(), "error")) << run.output();
  }
  Folder folder_;
};

class StoppedTraining : public Training, public ::testing::WithParamInterface<int> {};

TEST_P(StoppedTraining, EndsAfterTheStepOnAllRanksAndIsSaved) {
  Child run(train({"--ranks", "3", "--set", "train.batch=6"}));
  expect_steps();
  run.send(GetParam());
  expect_stopped(run);
}

// As `timeout` and systemd signal the launcher and its ranks, and the launcher forwards it.
TEST_F(Training, OneRequestMayArriveTwice) {
  Child run(train({"--ranks", "2"}));
  expect_steps();
  std::vector<pid_t> all = test::children_of(run.pid(), "bonfire");
  ASSERT_EQ(all.size(), 2u);
  all.push_back(run.pid());
  for (const pid_t process : all)
    for (const int signal : {SIGTERM, SIGINT}) kill(process, signal);
  expect_stopped(run);
}

// Whether a process takes a signal itself, or has yet to be given it.
bool takes(pid_t process, int signal) {
  std::istringstream status(test::read_file(fmt::format("/proc/{}/status", process)));
  std::uint64_t set = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigBlk:") || line.starts_with("SigCgt:")) set |= std::stoull(line.substr(7), nullptr, 16);
  return (set >> (signal - 1) & 1) != 0;
}

bool ignores(pid_t process, int signal) {
  std::istringstream status(test::read_file(fmt::format("/proc/{}/status", process)));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigIgn:")) return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
  return false;
}

// As nohup starts it.
std::vector<std::string> without_hang_ups(const std::vector<std::string>& words) {
  std::vector<std::string> all = {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

TEST_F(Training, WhatWasIgnoredStaysIgnoredInTheCommandAndItsRanks) {
  Child run(without_hang_ups(train({"--ranks", "2"})));
  expect_steps();
  std::vector<pid_t> all = test::children_of(run.pid(), "bonfire");
  ASSERT_EQ(all.size(), 2u);
  all.push_back(run.pid());
  for (const pid_t process : all) {
    EXPECT_TRUE(ignores(process, SIGHUP)) << (process == run.pid() ? "the command" : "a rank");
    EXPECT_EQ(kill(process, SIGHUP), 0);
  }
  const auto steps = metrics().size();
  ASSERT_TRUE(test::eventually([&] { return metrics().size() > 2 * steps; }, 60s)) << run.output();
  EXPECT_FALSE(contains(run.output(), "SIGHUP")) << run.output();
  run.send(SIGTERM);
  expect_stopped(run);
}

TEST_F(Training, WhatWasIgnoredStaysIgnoredByARankOfAnotherLauncher) {
  Child run(without_hang_ups(train({})), test::torchrun());
  expect_steps();
  EXPECT_TRUE(ignores(run.pid(), SIGHUP));
  run.send(SIGHUP);
  const auto steps = metrics().size();
  ASSERT_TRUE(test::eventually([&] { return metrics().size() > 2 * steps; }, 60s)) << run.output();
  run.send(SIGTERM);
  expect_stopped(run);
}

// From the first line of the program on, whatever the command and its ranks are at.
TEST_F(Training, ARequestIsHeardWheneverItComes) {
  const Random random(test::random_seed());
  for (std::uint64_t round = 0; round < 8; ++round) {
    const int signal = round % 2 == 0 ? SIGUSR1 : SIGTERM;
    Child run(train({"--ranks", "2"}));
    ASSERT_TRUE(test::eventually([&] { return takes(run.pid(), signal); }));
    const std::chrono::milliseconds delay(round < 2 ? 0 : random.below(round, 4000));
    std::this_thread::sleep_for(delay);
    run.send(signal);
    EXPECT_EQ(run.wait(60s), 3) << delay.count() << " ms: " << run.output();
    EXPECT_TRUE(contains(run.output(), "stopped on request")) << delay.count() << " ms: " << run.output();
    const bool begun = !contains(run.output(), "before the first step");
    EXPECT_TRUE(contains(run.output(), begun ? "continue with --resume" : "nothing was saved"))
        << delay.count() << " ms: " << run.output();
    EXPECT_FALSE(contains(run.output(), "error")) << delay.count() << " ms: " << run.output();
  }
}

// A run that is over, or nearly, is not killed.
TEST_F(Training, ARequestThatComesTooLateChangesNothing) {
  const Random random(test::random_seed());
  for (std::uint64_t round = 0; round < 6; ++round) {
    Child run(train({"--ranks", "2", "--set", "train.steps=3", "--set", "run.name=\"short\""}));
    ASSERT_TRUE(test::eventually([&] { return takes(run.pid(), SIGUSR1); }));
    const std::string metrics = folder_.path() + "/runs/short-latest/metrics.jsonl";
    ASSERT_TRUE(test::eventually([&] { return !run.running() || contains(test::read_file(metrics), "\n"); }, 60s));
    std::this_thread::sleep_for(std::chrono::milliseconds(random.below(round, 300)));
    if (run.running()) run.send(SIGUSR1);
    const int code = run.wait(60s);
    EXPECT_TRUE(code == 0 || code == 3) << code << run.output();
    std::filesystem::remove_all(folder_.path() + "/runs");
  }
}

// A terminal that goes sends several.
TEST_F(Training, HangUpsDoNotHurryARankOfAnotherLauncher) {
  Child run(train({}), test::torchrun());
  expect_steps();
  ASSERT_TRUE(test::eventually(
      [&] {
        if (run.running()) run.send(SIGHUP);
        return !run.running();
      },
      60s));
  expect_stopped(run);
}

// A token file of Megatron's, of 40 GiB and with nothing in it: false where there can be none.
bool write_large_tokens(const std::string& name) {
  constexpr std::int64_t sequences = 20, tokens = std::int64_t{1} << 30, width = 2;
  std::ofstream index(name + ".idx", std::ios::binary);
  const auto number = [&]<class T>(T value) { index.write(reinterpret_cast<const char*>(&value), sizeof value); };
  index.write("MMIDIDX\0", 9);
  number(std::uint64_t{1});
  number(std::uint8_t{8});  // u16
  number(sequences);
  number(std::int64_t{2});  // bounds of one document
  for (std::int64_t at = 0; at < sequences; ++at) number(static_cast<std::int32_t>(tokens));
  for (std::int64_t at = 0; at < sequences; ++at) number(at * tokens * width);
  for (const std::int64_t bound : {std::int64_t{0}, sequences}) number(bound);
  std::ofstream(name + ".bin");
  std::error_code error;
  std::filesystem::resize_file(name + ".bin", sequences * tokens * width, error);
  return !error;
}

// Before the first step there is nothing to finish: not while a token file is read, for which a large one takes its time.
class CheckedTraining : public Training, public ::testing::WithParamInterface<std::tuple<int, bool>> {};

TEST_P(CheckedTraining, ARequestEndsTheCheckAndLeavesNothing) {
  const auto [signal, torchrun] = GetParam();
  const std::string file = folder_.path() + "/tokens.bin";
  if (!write_large_tokens(folder_.path() + "/tokens")) GTEST_SKIP() << "there can be no file of 40 GiB here";
  std::vector<std::string> more = {"--set", "data.type=\"tokens\"", "--set", "data.paths=[\"" + file + "\"]",
                                   "--set", "data.check=\"full\""};
  if (!torchrun) more.insert(more.end(), {"--ranks", "2"});
  Child run(train(more), torchrun ? test::torchrun() : std::map<std::string, std::string>{});
  ASSERT_TRUE(run.said("checking '", 60s));
  run.send(signal);
  EXPECT_EQ(run.wait(60s), 3) << run.output();
  EXPECT_TRUE(contains(run.output(), "stopped on request before the first step; nothing was saved")) << run.output();
  EXPECT_FALSE(std::filesystem::exists(file + ".checked"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() + "/runs"));
}

INSTANTIATE_TEST_SUITE_P(Signals, CheckedTraining,
                         ::testing::Combine(::testing::Values(SIGUSR1, SIGTERM), ::testing::Bool()), [](const auto& info) {
                           return std::string(sigabbrev_np(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "Torchrun" : "Ranks");
                         });

// A driver may take half a minute to start.
class SlowDriver : public Training {
 protected:
  SlowDriver() {
    std::filesystem::create_directory(folder_.path() + "/driver");
    std::filesystem::create_symlink(SLOW_DRIVER, folder_.path() + "/driver/libcuda.so.1");
  }
  const std::map<std::string, std::string> variables_ = {
      {"LD_LIBRARY_PATH", folder_.path() + "/driver"}, {"CUDA_VISIBLE_DEVICES", "0"}, {"BONFIRE_RANKS", ""}};
};

TEST_F(SlowDriver, WhatWasIgnoredStaysIgnoredMeanwhile) {
  Child run(without_hang_ups(train({"--set", "run.device=\"auto\""})), variables_);
  ASSERT_TRUE(run.said("looking for GPUs", 60s));
  EXPECT_TRUE(ignores(run.pid(), SIGHUP));
  EXPECT_FALSE(ignores(run.pid(), SIGTERM));
}

TEST_F(SlowDriver, ARequestIsHeardMeanwhile) {
  Child run(train({"--set", "run.device=\"auto\""}), variables_);
  ASSERT_TRUE(run.said("looking for GPUs", 60s));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(30s), 3) << run.output();
  EXPECT_TRUE(contains(run.output(), "stopped on request before the first step")) << run.output();
}

std::map<std::string, std::string> requested_at(const std::string& call) {
  return {{"LD_PRELOAD", REQUEST_AT}, {"REQUEST_AT", call}, {"REQUEST_SIGNAL", std::to_string(SIGUSR1)}};
}

// Whatever it was that made a folder when a request came: one that stays is named.
TEST_F(Training, ARequestLeavesNoFolderThatNobodyKnowsOf) {
  for (const char* name : {"/tmp", "/runs"}) std::filesystem::create_directory(folder_.path() + name);
  for (const std::string call : {"mkdir", "mkdtemp"}) {
    std::vector<std::string> words = train({"--ranks", "1"});
    if (call == "mkdtemp") words = {kBonfire, "bench", "step", folder_.path() + "/a.toml", "--ranks", "1"};
    auto variables = requested_at(call);
    variables["TMPDIR"] = folder_.path() + "/tmp";
    Child run(words, variables);
    EXPECT_EQ(run.wait(60s), 3) << call << run.output();
    EXPECT_TRUE(contains(run.output(), "stopped on request")) << call << run.output();
    const std::string parent = folder_.path() + (call == "mkdir" ? "/runs" : "/tmp");
    for (const auto& entry : std::filesystem::directory_iterator(parent))
      EXPECT_TRUE(entry.is_symlink() || contains(run.output(), entry.path().string())) << entry.path() << run.output();
  }
}

// The ranks have ended well when their folder is removed.
TEST(Signals, ARequestAfterTheRanksHaveEndedChangesNothing) {
  Child run(launch({"-n", "1"}, "true"), requested_at("unlinkat"));
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_FALSE(contains(run.output(), "stopped")) << run.output();
}

// The rank of a benchmark of collectives with that number.
pid_t benchmark_rank(Child& run, const std::string& number) {
  pid_t found = -1;
  EXPECT_TRUE(test::eventually([&] {
    for (const pid_t process : test::children_of(run.pid(), "bonfire")) {
      const std::string variables = '\0' + test::read_file(fmt::format("/proc/{}/environ", process));
      if (contains(variables, std::string("\0RANK=", 6) + number + '\0')) found = process;
    }
    return found != -1;
  }));
  return found;
}

const std::vector<std::string> kLongBenchmark = {kBonfire, "bench", "comm", "--ranks",   "2",        "--device",
                                                 "cpu",    "--to",  "1024", "--repeats", "100000000"};

// Ranks that are ended because another one failed were not asked to.
TEST(Signals, ABenchmarkThatFailsWasNotStoppedOnRequest) {
  Child run(kLongBenchmark);
  ASSERT_TRUE(run.said("# all_reduce", 60s));
  // Rank 0 is not to notice before the launcher ends it.
  const pid_t other = benchmark_rank(run, "0");
  ASSERT_EQ(kill(other, SIGSTOP), 0);
  ASSERT_TRUE(run.said("rank 0 was stopped"));
  ASSERT_EQ(kill(benchmark_rank(run, "1"), SIGKILL), 0);
  EXPECT_EQ(run.wait(30s), 1) << run.output();
  EXPECT_FALSE(contains(run.output(), "stopped on request")) << run.output();
  EXPECT_TRUE(contains(run.output(), "rank 1 was killed by SIGKILL")) << run.output();
}

TEST(Signals, ABenchmarkIsStoppedOnRequest) {
  Child run(kLongBenchmark);
  ASSERT_TRUE(run.said("# all_reduce", 60s));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(30s), 3) << run.output();
  const std::string words = "bonfire: stopped on request\n", said = run.output();
  EXPECT_TRUE(contains(said, words)) << said;
  EXPECT_EQ(said.find(words), said.rfind(words)) << said;
}

// Ranks that wait for others have nothing to finish: all that are there end.
TEST_F(Training, ARequestEndsARunThatWaitsForItsRanks) {
  const testing::Port port("127.0.0.2");
  for (const char* node : {"0", "1"}) {
    Child run(train({"--ranks", "2", "--nodes", "2", "--node-rank", node, "--master", "127.0.0.2:" + port.number(), "--set",
                     "train.batch=8"}));
    // Rank 0 says so when it waits; those of the other node have nobody to ask.
    const bool there = node[0] == '0'
                           ? run.said("have 2 of 4, missing ranks 2, 3", 60s)
                           : test::eventually([&] { return test::children_of(run.pid(), "bonfire").size() == 2; });
    ASSERT_TRUE(there) << run.output();
    run.send(SIGUSR1);
    EXPECT_EQ(run.wait(40s), 3) << run.output();
  }
}

INSTANTIATE_TEST_SUITE_P(Signals, StoppedTraining, ::testing::Values(SIGUSR1, SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

// `train` starts ranks on several nodes as `launch` does, and a signal to one of its commands is heard by all.
class TrainingOnNodes : public Training, public ::testing::WithParamInterface<int> {};

TEST_P(TrainingOnNodes, EndsTogether) {
  const testing::Port port("127.0.0.2");
  const auto node = [&](const char* number) {
    return train({"--ranks", "1", "--nodes", "2", "--node-rank", number, "--master", "127.0.0.2:" + port.number()});
  };
  Child zero(node("0")), one(node("1"));
  expect_steps();
  one.send(GetParam());
  expect_stopped(zero);
  EXPECT_EQ(one.wait(30s), 3) << one.output();
}

INSTANTIATE_TEST_SUITE_P(Signals, TrainingOnNodes, ::testing::Values(SIGUSR1, SIGTERM, SIGINT),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

}  // namespace
}  // namespace bonfire::training_signals_test
