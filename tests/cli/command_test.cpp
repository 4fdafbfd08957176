#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "tests/cli/command.h"

// The command as a person meets it: mistyped, asked for help, on a terminal, beside a full disk.
namespace bonfire::command_test {
namespace {
using bonfire::testing::Ended;
using bonfire::testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = 1\nheads = 2\nvocab = 32\n"
    "[data]\nsequence = 8\n[train]\nsteps = 3\n";

bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

void expect_refused(const Ended& ended, const std::string& words) {
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  EXPECT_LT(ended.err.size(), 200) << ended.err;
  EXPECT_TRUE(has(ended.err, words)) << words << " is not in: " << ended.err;
}

TEST(Command, AWordThatIsNoCommandGetsTheNearestOne) {
  const Scratch scratch;
  expect_refused(scratch.bonfire("trian a.toml"), "'trian' is not a command of bonfire; did you mean train?");
  expect_refused(scratch.bonfire("bench setp a.toml"), "'setp' is not a command of bonfire bench; did you mean step?");
  expect_refused(scratch.bonfire("xyzzy"), "'xyzzy' is not a command of bonfire; commands: train, launch");
  expect_refused(scratch.bonfire(""), "bonfire needs a command: train, launch");
  expect_refused(scratch.bonfire("bench"), "bonfire bench needs a command: comm, step");
}

TEST(Command, AnOptionThatIsNoneGetsTheNearestOne) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  expect_refused(scratch.bonfire("train a.toml --rank 2"), "bonfire train has no option --rank; did you mean --ranks?");
  expect_refused(scratch.bonfire("train a.toml b.toml"), "'b.toml' is one argument too many");
}

TEST(Command, HelpAboutACommandIsItsHelp) {
  const Scratch scratch;
  for (const std::string command : {"train", "launch", "bench", "bench step", "plan"}) {
    const auto help = scratch.bonfire("help " + command);
    EXPECT_EQ(help.code, 0) << help.err;
    EXPECT_TRUE(has(help.out, "Usage: bonfire " + command)) << help.out;
    EXPECT_EQ(help.out, scratch.bonfire(command + " --help").out);
  }
  EXPECT_EQ(scratch.bonfire("help").out, scratch.bonfire("--help").out);
  expect_refused(scratch.bonfire("help trian"), "did you mean train?");
}

TEST(Command, ANumberThatIsNotAllowedIsRefusedInOneLine) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  expect_refused(scratch.bonfire("train a.toml --ranks 0"), "--ranks: 0; allowed: a number, at least 1");
  expect_refused(scratch.bonfire("train a.toml --ranks two"), "--ranks: two; allowed: a number, at least 1");
  expect_refused(scratch.bonfire("train a.toml --max-restarts -1"), "--max-restarts: -1; allowed: a number, at least 0");
  expect_refused(scratch.bonfire("launch -n 0 -- true"), "--ranks: 0; allowed: a number, at least 1");
}

TEST(Command, AnObjectThatIsLostIsNoSuccess) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto lost = [&](const std::string& arguments, const std::string& reason = ": No space left on device") {
    const auto said = bonfire::testing::run_shell("cd '" + scratch.path().string() +
                                                  "' && '" BONFIRE_BUILD_DIR "/bonfire' " + arguments + " > /dev/full");
    EXPECT_EQ(said.code, 1) << arguments << ": " << said.output;
    EXPECT_TRUE(has(said.output, "bonfire: stdout cannot be written" + reason)) << arguments << ": " << said.output;
  };
  lost("schedule 1f1b --ranks 2 --microbatches 4 --json");
  lost("plan a.toml --memory --json");
  lost("help train");
  lost("train a.toml --json", ": No space left on device; what was to go there is in runs/tiny/report.json");
  lost("bench step a.toml --steps 1 --json");
  lost("bench comm --ranks 2 --from 1024 --to 1024 --repeats 1 --json");
  lost("--version", "");
}

// How often libgomp, by its own account, looks before it sleeps; 300,000 times where nobody says.
std::string spins(const std::string& said) {
  const std::string name = "GOMP_SPINCOUNT = '";
  const auto at = said.rfind(name);
  if (at == std::string::npos) return said;
  return said.substr(at + name.size(), said.find('\'', at + name.size()) - at - name.size());
}

TEST(Command, ThreadsOfRanksSpinShortlyUnlessToldOtherwise) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto of_a_rank = [&](const std::string& variables) {
    const auto ended = scratch.bonfire("train a.toml --ranks 1", "OMP_DISPLAY_ENV=verbose " + variables);
    EXPECT_EQ(ended.code, 0) << ended.err;
    return spins(scratch.read("runs/tiny-latest/logs/rank-0.log"));
  };
  EXPECT_EQ(of_a_rank(""), "3000");
  EXPECT_EQ(of_a_rank("OMP_WAIT_POLICY=active"), "30000000000");
  EXPECT_EQ(of_a_rank("GOMP_SPINCOUNT=7"), "7");
}

// Its variables were not ours to set. The last word is that of the program that trains.
TEST(Command, RanksThatAnotherLauncherHasStartedSpinShortlyToo) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const std::string torchrun = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 ";
  const auto ended = scratch.bonfire("train a.toml", torchrun + "OMP_DISPLAY_ENV=verbose");
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(spins(ended.err), "3000");
  EXPECT_EQ(spins(scratch.bonfire("train a.toml", torchrun + "OMP_DISPLAY_ENV=verbose GOMP_SPINCOUNT=7").err), "7");
}

TEST(Command, ARunSaysWhetherAndWhereWeightsAreKept) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  for (const bool kept : {true, false}) {
    const auto ended = scratch.bonfire(kept ? "train a.toml" : "train a.toml --set checkpoint.every=0");
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto first =
                   ended.err.find(kept ? "weights: saved every 100 steps and at the end, in runs/" : "weights: not kept"),
               last = ended.err.find(kept ? "weights  runs/" : "weights  not kept");
    const auto step = ended.err.find("step: 1 ");
    ASSERT_NE(step, std::string::npos) << ended.err;
    EXPECT_LT(first, step) << "before it starts: " << ended.err;
    EXPECT_NE(last, std::string::npos) << "and in the summary: " << ended.err;
  }
}

// What a process shows on a terminal of its own, whose width changes when the first bar is there.
std::string on_a_terminal(const Scratch& scratch, unsigned short columns, unsigned short then) {
  winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, &size);
  if (child == 0) {
    if (chdir(scratch.path().c_str()) == 0)
      execl(BONFIRE_BUILD_DIR "/bonfire", "bonfire", "train", "a.toml", "--set", "train.steps=300", nullptr);
    _exit(127);
  }
  std::string shown;
  char bytes[4096];
  ssize_t got;
  while ((got = read(terminal, bytes, sizeof bytes)) > 0) {
    shown.append(bytes, static_cast<std::size_t>(got));
    if (size.ws_col == then || !has(shown, "\r[")) continue;
    size.ws_col = then;
    ioctl(terminal, TIOCSWINSZ, &size);
  }
  close(terminal);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << shown;
  return shown;
}

TEST(Command, TheBarFollowsTheWidthOfTheWindow) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  const auto last_bar = [&](unsigned short columns, unsigned short then) {
    const auto shown = on_a_terminal(scratch, columns, then);
    const auto start = shown.rfind("\r["), end = shown.find("\033[K", start);
    EXPECT_NE(end, std::string::npos) << shown;
    return shown.substr(start + 1, end - start - 1);
  };
  EXPECT_EQ(last_bar(100, 20).size(), 19);
  EXPECT_TRUE(has(last_bar(20, 100), "300/300"));
}

}  // namespace
}  // namespace bonfire::command_test
