// Readers that do not read, or have gone: a run goes on, and its files have everything.
#include <fcntl.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/launcher.h"
#include "tests/comm/launched.h"
#include "tests/comm/pipe.h"
#include "tests/support/port.h"

namespace bonfire::output_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;
using test::launch;
using test::Pipe;

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
  EXPECT_EQ(run.wait(60s), 0);
  for (const char* rank : {"0", "1"}) {
    EXPECT_TRUE(std::filesystem::exists(end + "-" + rank));
    EXPECT_EQ(test::read_file(folder.path() + "/rank-" + rank + ".log"), "up\nmore\nwords\n");
  }
}

// `| head -1`: before the ranks are launched there are words already, of token files that are checked, and behind them there
// are some, too.
TEST(Output, AReaderThatHasLeftBeforeTheLaunchEndsNoTraining) {
  const Folder folder;
  const std::string tokens = folder.path() + "/tokens.bin", metrics = folder.path() + "/runs/tiny/metrics.jsonl";
  std::ofstream(folder.path() + "/text") << std::string(2000, 'x');
  Child made({kBonfire, "tokens", folder.path() + "/text", "-o", tokens});
  ASSERT_EQ(made.wait(60s), 0) << made.output();
  // What is found cannot be kept, which is said.
  std::filesystem::create_directory(tokens + ".checked");
  std::ofstream(folder.path() + "/a.toml")
      << "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = 1\nheads = 2\nvocab = "
         "256\n[data]\ntype = \"tokens\"\ncheck = \"full\"\npaths = [\""
      << tokens << "\"]\nsequence = 8\n[train]\nsteps = 2\nbatch = 4\n";
  std::vector<std::string> words = {kBonfire, "train", folder.path() + "/a.toml", "--set",
                                    "run.folder=" + folder.path() + "/runs"};
  const testing::Port port;
  {
    Child read(words);
    EXPECT_EQ(read.wait(60s), 0);
    EXPECT_TRUE(contains(read.output(), "will be checked again next time")) << read.output();
    EXPECT_LT(read.output().find("will be checked again"), read.output().find("weights: ")) << read.output();
  }
  for (const bool json : {false, true}) {
    if (json) words.push_back("--json");
    for (const auto& variables : {std::map<std::string, std::string>(), test::torchrun(port.number())}) {
      std::filesystem::remove_all(folder.path() + "/runs");
      Pipe pipe;
      pipe.close_reader();
      Child run(words, variables, {.output = pipe.ends[1]});
      // A script must not be told that all went well where its object was lost.
      EXPECT_EQ(run.wait(60s), json ? 1 : 0) << variables.size();
      const std::string lines = test::read_file(metrics);
      EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2) << variables.size();
    }
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
  EXPECT_EQ(run.wait(60s), 0);
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
  EXPECT_EQ(run.wait(60s), 3);
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

// A pager that nobody scrolls, with all that it holds: the command ends all the same, and not as if all had gone well.
TEST(Output, AFinishedCommandDoesNotWaitForAReaderForEver) {
  const Folder folder;
  std::ofstream(folder.path() + "/a.toml") << "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = "
                                              "1\nheads = 2\nvocab = 32\n[data]\nsequence = 8\n[train]\nsteps = "
                                              "2\nbatch = 4\n";
  Pipe pipe;
  ASSERT_EQ(fcntl(pipe.ends[1], F_SETFL, O_NONBLOCK), 0);
  while (write(pipe.ends[1], "word ", 5) == 5) {
  }
  ASSERT_EQ(fcntl(pipe.ends[1], F_SETFL, 0), 0);
  for (const std::string& command : {"train " + folder.path() + "/a.toml --set run.folder=" + folder.path() + "/runs",
                                     std::string("bench comm --ranks 2 --to 1024 --repeats 1")}) {
    std::vector<std::string> words = {kBonfire};
    std::istringstream all(command + " --json");
    for (std::string word; all >> word;) words.push_back(word);
    Child run(words, {{"BONFIRE_READER_TIMEOUT", "1"}}, {.output = pipe.ends[1]});
    EXPECT_EQ(run.wait(90s), 1) << command;
  }
}

TEST(Output, ALimitThatIsNoNumberIsRefused) {
  for (const std::string name : {"BONFIRE_READER_TIMEOUT", "BONFIRE_STOP_TIMEOUT"}) {
    Child run(launch({"-n", "1"}, "true"), {{name, "soon"}});
    EXPECT_EQ(run.wait(60s), 2);
    EXPECT_TRUE(contains(run.output(), name + " is 'soon': a number of seconds")) << run.output();
  }
}

TEST(Output, ClosedStreamsAreNobodyElses) {
  for (const char* closed : {"0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"}) {
    const Folder folder;
    Child run({"sh", "-c",
               fmt::format("exec {} launch -n 2 --logs {} -- sh -c 'echo out; echo err >&2; cat' {}", kBonfire,
                           folder.path(), closed)});
    EXPECT_EQ(run.wait(60s), 0) << closed << run.output();
    for (const char* rank : {"0", "1"}) {
      const std::string log = test::read_file(folder.path() + "/rank-" + rank + ".log");
      EXPECT_TRUE(log == "out\nerr\n" || log == "err\nout\n") << closed << ": " << log;
    }
  }
}

TEST(Output, FilesOfOneRankAreNotOpenInAnother) {
  const Folder folder;
  Child run(launch({"-n", "3", "--logs", folder.path()}, "ls -l /proc/self/fd"));
  EXPECT_EQ(run.wait(60s), 0);
  EXPECT_FALSE(contains(run.output(), folder.path())) << run.output();
}

// A disk that is full and has room again: what could not be written is missing, and what follows is not.
TEST(Output, ALogGoesOnWhenItCanBeWrittenAgain) {
  const Folder folder;
  Pipe pipe;
  std::vector<std::string> words = launch({"-n", "1", "--logs", folder.path()},
                                          fmt::format("i=0; while [ ! -e {0}/end ]; do echo line $i; echo $i > {0}/count; "
                                                      "i=$((i+1)); sleep 0.01; done; echo last line",
                                                      folder.path()));
  words.insert(words.begin(), {"env", "--ignore-signal=XFSZ"});
  Child run(words, {}, {.output = pipe.ends[1]});
  const std::string log = folder.path() + "/rank-0.log";
  const auto written = [&] { return std::atoi(test::read_file(folder.path() + "/count").c_str()); };
  ASSERT_TRUE(test::eventually([&] { return contains(test::read_file(log), "line 5\n"); }));
  // The launcher's files cannot grow any more.
  rlimit before{};
  ASSERT_EQ(prlimit(run.pid(), RLIMIT_FSIZE, nullptr, &before), 0);
  const rlimit full{.rlim_cur = test::read_file(log).size() + 3, .rlim_max = before.rlim_max};
  ASSERT_EQ(prlimit(run.pid(), RLIMIT_FSIZE, &full, nullptr), 0);
  const int then = written();
  ASSERT_TRUE(test::eventually([&] { return written() > then + 20; }));
  EXPECT_FALSE(contains(test::read_file(log), fmt::format("line {}\n", then + 10)));
  ASSERT_EQ(prlimit(run.pid(), RLIMIT_FSIZE, &before, nullptr), 0);
  EXPECT_TRUE(test::eventually(
      [&] { return contains(test::read_file(log), "lines of the rank are missing here, which could not be written\n"); }));
  std::filesystem::create_directory(folder.path() + "/end");
  const std::string said = pipe.read_all();
  EXPECT_EQ(run.wait(60s), 0) << said;
  EXPECT_TRUE(test::read_file(log).ends_with("last line\n"));
  const std::string complaint = "cannot be written: File too large; what follows is missing in it";
  ASSERT_TRUE(contains(said, complaint)) << said;
  EXPECT_EQ(said.find(complaint), said.rfind(complaint)) << "once, not for each line";
  EXPECT_TRUE(contains(said, "can be written again")) << said;
}

// A command on a terminal of its own, which reads what that shows and types on it.
class OnATerminal {
 public:
  explicit OnATerminal(const std::vector<std::string>& words) {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    int terminal = -1;
    pid_ = forkpty(&terminal, nullptr, nullptr, nullptr);
    if (pid_ == 0) {
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    terminal_ = terminal;
  }
  ~OnATerminal() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    close(terminal_);
  }
  void type(char letter) const { EXPECT_EQ(write(terminal_, &letter, 1), 1); }
  // Until the command has ended.
  std::string read_all() const {
    std::string shown;
    char bytes[1 << 16];
    ssize_t got;
    while ((got = read(terminal_, bytes, sizeof bytes)) > 0) shown.append(bytes, static_cast<std::size_t>(got));
    return shown;
  }
  int wait() {
    int status = -1;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  int terminal_ = -1;
  pid_t pid_ = -1;
};

TEST(Output, AHaltedTerminalHaltsNothing) {
  const Folder folder;
  OnATerminal run(
      launch({"-n", "2", "--logs", folder.path()},
             fmt::format("while [ ! -e {0}/go ]; do sleep 0.02; done; {1} touch {0}/end-$RANK", folder.path(), kFlood)));
  constexpr char halt = 'S' & 0x1f, go_on = 'Q' & 0x1f;
  run.type(halt);
  std::filesystem::create_directory(folder.path() + "/go");
  for (const char* rank : {"0", "1"})
    ASSERT_TRUE(test::eventually([&] { return std::filesystem::exists(folder.path() + "/end-" + rank); }, 60s)) << rank;
  run.type(go_on);
  const std::string shown = run.read_all();
  EXPECT_EQ(run.wait(), 0);
  EXPECT_TRUE(contains(shown, "were left out here, because nobody read them")) << shown.substr(0, 1000);
}

// `stty tostop` stops a background job that writes.
TEST(Output, ATerminalStopsNoBackgroundJob) {
  const Folder folder;
  OnATerminal run(
      {"sh", "-c",
       fmt::format("stty tostop; set -m; {} launch -n 2 --logs {} -- sh -c 'echo words; echo more >&2' & wait $!; "
                   "echo code $?",
                   kBonfire, folder.path())});
  const std::string shown = run.read_all();
  EXPECT_EQ(run.wait(), 0) << shown;
  EXPECT_TRUE(contains(shown, "code 0")) << shown;
  EXPECT_TRUE(contains(shown, "[rank 1] words")) << shown;
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

}  // namespace
}  // namespace bonfire::output_test
