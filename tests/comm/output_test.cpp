// Readers that do not read, or have gone: a run goes on, and its files have everything.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/launcher.h"
#include "tests/comm/launched.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;

struct Pipe {
  Pipe() { EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0); }
  ~Pipe() {
    close_reader();
    close_writer();
  }
  void close_reader() { close(0); }
  void close_writer() { close(1); }
  // Until the other side has ended.
  std::string read_all() {
    close_writer();
    std::string text;
    char bytes[1 << 16];
    ssize_t got;
    while ((got = read(ends[0], bytes, sizeof bytes)) > 0) text.append(bytes, static_cast<std::size_t>(got));
    return text;
  }
  void close(int end) {
    if (ends[end] >= 0) ::close(ends[end]);
    ends[end] = -1;
  }
  int ends[2] = {-1, -1};
};

// 40,000 lines of 100 letters, far more than a pipe and the launcher's own buffer hold.
const std::string kFlood =
    "i=0; line=$(printf '%0100d' 0); while [ $i -lt 20000 ]; do echo $line; echo $line; i=$((i+1)); done; echo last line; ";

TEST(Output, AReaderThatLeavesEndsNothing) {
  const Folder folder;
  Pipe pipe;
  const std::string gate = folder.path() + "/gate", end = folder.path() + "/end";
  Child run(launch({"-n", "2", "--logs", folder.path()},
                   fmt::format("echo up; while [ ! -e {} ]; do sleep 0.02; done; echo more; echo words >&2; touch {}-$RANK",
                               gate, end)),
            {}, {.output = pipe.ends[1]});
  char letter;
  ASSERT_EQ(read(pipe.ends[0], &letter, 1), 1);
  pipe.close_reader();
  pipe.close_writer();
  std::filesystem::create_directory(gate);
  EXPECT_EQ(run.wait(20s), 0);
  for (const char* rank : {"0", "1"}) {
    EXPECT_TRUE(std::filesystem::exists(end + "-" + rank));
    EXPECT_EQ(test::read_file(folder.path() + "/rank-" + rank + ".log"), "up\nmore\nwords\n");
  }
}

TEST(Output, AReaderThatDoesNotReadFreezesNothingAndIsToldWhatItMissed) {
  const Folder folder;
  Pipe pipe;
  Child run(launch({"-n", "2", "--logs", folder.path()}, kFlood + "touch " + folder.path() + "/end-$RANK"), {},
            {.output = pipe.ends[1]});
  for (const char* rank : {"0", "1"})
    EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder.path() + "/end-" + rank); }, 60s)) << rank;
  // The ranks have ended; what fits is kept for a reader that comes back.
  const std::string shown = pipe.read_all();
  EXPECT_EQ(run.wait(20s), 0);
  EXPECT_TRUE(
      contains(shown, "lines of the ranks were left out here, because nobody read them; they are in " + folder.path()))
      << shown.substr(shown.size() - std::min<std::size_t>(shown.size(), 1000));
  for (const char* rank : {"0", "1"}) {
    const std::string log = test::read_file(folder.path() + "/rank-" + rank + ".log");
    EXPECT_EQ(log.size(), 40000u * 101 + 10);
    EXPECT_TRUE(log.ends_with("last line\n"));
  }
}

TEST(Output, ARequestToStopIsHeardWhereNobodyReads) {
  const Folder folder;
  Pipe pipe;
  Child run(launch({"-n", "2", "--logs", folder.path()},
                   "trap 'touch " + folder.path() + "/heard-$RANK; exit 3' TERM; touch " + folder.path() +
                       "/up-$RANK; while true; do echo words, words, words, words, words, words, words; done"),
            {}, {.output = pipe.ends[1]});
  for (const char* rank : {"0", "1"}) {
    ASSERT_TRUE(test::eventually([&] { return std::filesystem::exists(folder.path() + "/up-" + rank); }));
    // Much more than the pipe and the launcher hold.
    ASSERT_TRUE(test::eventually(
        [&] {
          std::error_code error;
          return std::filesystem::file_size(folder.path() + "/rank-" + rank + ".log", error) > (4 << 20) && !error;
        },
        60s));
  }
  run.send(SIGTERM);
  for (const char* rank : {"0", "1"})
    EXPECT_TRUE(test::eventually([&] { return std::filesystem::exists(folder.path() + "/heard-" + rank); })) << rank;
  // The last words wait for a reader, until somebody asks again.
  EXPECT_TRUE(test::eventually([&] { return test::children_of(run.pid(), "sh").empty(); }));
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(10s), 3);
}

// Words on stderr that nobody reads make nobody believe that something is missing on stdout.
TEST(Output, WhatIsMissingOnStdoutIsKnown) {
  const Folder folder;
  const int before = dup(STDOUT_FILENO), before_err = dup(STDERR_FILENO);
  const auto error_of = [&](const std::string& script, bool closed) {
    Pipe pipe;
    dup2(pipe.ends[1], STDOUT_FILENO);
    dup2(pipe.ends[1], STDERR_FILENO);
    pipe.close_writer();
    if (closed) pipe.close_reader();
    const LaunchOutcome outcome = launch_ranks(
        {.program = {"sh", "-c", script}, .log_folder = folder.path(), .reader_patience = 200ms, .log = Log::silent()});
    dup2(before, STDOUT_FILENO);
    dup2(before_err, STDERR_FILENO);
    EXPECT_EQ(outcome.exit_code, 0);
    return outcome.stdout_error;
  };
  EXPECT_EQ(error_of("echo words", false), 0);
  EXPECT_EQ(error_of("echo words", true), EPIPE);
  EXPECT_EQ(error_of("echo words >&2", true), 0);
  EXPECT_EQ(error_of(kFlood, false), EAGAIN);
  EXPECT_EQ(error_of("exec 1>&2; " + kFlood, false), 0);
  close(before);
  close(before_err);
}

TEST(Output, ClosedStreamsAreNobodyElses) {
  for (const char* closed : {"0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"}) {
    const Folder folder;
    Child run({"sh", "-c",
               fmt::format("exec {} launch -n 2 --logs {} -- sh -c 'echo out; echo err >&2; cat' {}", kBonfire,
                           folder.path(), closed)});
    EXPECT_EQ(run.wait(20s), 0) << closed << run.output();
    for (const char* rank : {"0", "1"}) {
      const std::string log = test::read_file(folder.path() + "/rank-" + rank + ".log");
      EXPECT_TRUE(log == "out\nerr\n" || log == "err\nout\n") << closed << ": " << log;
    }
  }
}

TEST(Output, FilesOfOneRankAreNotOpenInAnother) {
  const Folder folder;
  Child run(launch({"-n", "3", "--logs", folder.path()}, "ls -l /proc/self/fd"));
  EXPECT_EQ(run.wait(20s), 0);
  EXPECT_FALSE(contains(run.output(), folder.path())) << run.output();
}

TEST(Output, EveryAttemptHasItsOwnLog) {
  const Folder folder;
  Child run(launch({"-n", "2", "--max-restarts", "2", "--logs", folder.path()},
                   "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ]"));
  EXPECT_EQ(run.wait(30s), 0) << run.output();
  EXPECT_EQ(test::read_file(folder.path() + "/rank-1.log"), "attempt 0\n");
  EXPECT_EQ(test::read_file(folder.path() + "/rank-1.restart-1.log"), "attempt 1\n");
  EXPECT_EQ(test::read_file(folder.path() + "/rank-1.restart-2.log"), "attempt 2\n");
}

TEST(Output, AFolderThatStaysIsNamedAndOneThatNobodyNeedsGoes) {
  const Folder folder;
  const auto left = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) names.push_back(entry.path());
    return names;
  };
  Child well(launch({"-n", "2"}, "true"), {{"TMPDIR", folder.path()}});
  EXPECT_EQ(well.wait(20s), 0);
  EXPECT_TRUE(left().empty());
  Child absent({kBonfire, "launch", "--", "/no/such/program"}, {{"TMPDIR", folder.path()}});
  EXPECT_EQ(absent.wait(20s), 2);
  EXPECT_TRUE(left().empty());
  Child failed(launch({"-n", "2"}, "exit 4"), {{"TMPDIR", folder.path()}});
  EXPECT_EQ(failed.wait(20s), 1);
  ASSERT_EQ(left().size(), 1u);
  EXPECT_TRUE(contains(failed.output(), "the ranks' output is in " + left().front())) << failed.output();
}

TEST(Output, AFolderThatCannotBeMadeIsRefusedWithTheReason) {
  Child run(launch({"-n", "2"}, "true"), {{"TMPDIR", "/proc"}});
  EXPECT_EQ(run.wait(20s), 1);
  EXPECT_TRUE(contains(run.output(), "cannot make a folder for the ranks' output in '/proc': ")) << run.output();
  EXPECT_FALSE(contains(run.output(), "Success")) << run.output();
}

}  // namespace
}  // namespace bonfire
