// Saving, resuming and looking into checkpoints with the command.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/support/thrown.h"

namespace bonfire::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using testing::Ended;
using testing::expect_part;
using testing::run_shell;
using testing::Scratch;

constexpr const char* tiny =
    "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = "
    "2\nffn = "
    "32\nvocab = 32\n[data]\nsequence = 8\n[train]\nsteps = 6\nbatch = 12\n[optimizer]\ndecay = \"constant\"\nwarmup = "
    "1\n[checkpoint]\nevery = 2\n";

class CheckpointCommand : public ::testing::Test {
 protected:
  CheckpointCommand() { scratch_.write("a.toml", tiny); }
  Ended train(const std::string& more, const std::string& variables = "") const {
    return scratch_.bonfire("train a.toml " + more, variables);
  }
  void trained(const std::string& more, const std::string& variables = "") const {
    const auto ended = train(more, variables);
    ASSERT_EQ(ended.code, 0) << ended.err;
  }
  std::vector<nlohmann::json> metrics(const std::string& folder) const {
    std::vector<nlohmann::json> lines;
    std::ifstream in(scratch_.path() / folder / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }
  // Refused in one line, before anything is written.
  std::string refused(const std::string& more) const {
    const auto ended = train(more);
    EXPECT_EQ(ended.code, 2) << ended.err;
    EXPECT_EQ(ended.err.find('\n'), ended.err.size() - 1) << ended.err;
    return ended.err;
  }
  // Every file of the runs, and what is in it.
  std::string contents() const {
    return run_shell(
               fmt::format("cd {}/runs && find . -type f | sort | xargs sha256sum; find . | sort", scratch_.path().string()))
        .output;
  }
  bool exists(const std::string& path) const { return fs::exists(scratch_.path() / path); }

  const Scratch scratch_;
};

TEST_F(CheckpointCommand, ARunGoesOnInItsFolder) {
  trained("--ranks 2 --set run.name=whole --set train.steps=9");
  trained("--ranks 2");
  trained("--ranks 3 --resume latest --set train.steps=9");
  EXPECT_FALSE(exists("runs/tiny-2"));
  const auto whole = metrics("runs/whole"), rest = metrics("runs/tiny");
  ASSERT_EQ(whole.size(), rest.size());
  for (std::size_t at = 0; at < whole.size(); ++at) {
    EXPECT_EQ(rest[at].at("step"), at + 1);
    EXPECT_NEAR(rest[at].at("loss").get<double>(), whole[at].at("loss").get<double>(), 1e-5);
  }
  // From a checkpoint a run of its own begins; that of the folder stays as it is.
  trained("--ranks 1 --resume runs/tiny/checkpoints/step-00000008 --set train.steps=9");
  const auto own = metrics("runs/tiny-2");
  ASSERT_EQ(own.size(), 1u);
  EXPECT_EQ(own.front().at("step"), 9);
  EXPECT_NEAR(own.front().at("loss").get<double>(), whole.back().at("loss").get<double>(), 1e-5);
  EXPECT_EQ(metrics("runs/tiny").size(), 9u);
}

TEST_F(CheckpointCommand, WhatCannotBeResumedIsRefusedBeforeAnythingStarts) {
  expect_part(refused("--resume latest"), "there is no run 'tiny' in 'runs'");
  expect_part(refused("--resume nowhere"), "--resume nowhere: is no folder");
  trained("--ranks 1");
  const auto before = run_shell("ls -R " + scratch_.path().string()).output;
  expect_part(refused("--resume latest"),
              "train.steps = 6: the checkpoint 'runs/tiny/checkpoints/step-00000006' is of step 6");
  expect_part(refused("--resume latest --set train.steps=9 --set model.dim=32"),
              "model.dim = 32: the run that is resumed has 16");
  expect_part(refused("--resume runs --set train.steps=9"), "has no complete checkpoint");
  EXPECT_EQ(run_shell("ls -R " + scratch_.path().string()).output, before);
}

TEST_F(CheckpointCommand, ABrokenCheckpointIsNamedAndTheOneBeforeServes) {
  trained("--ranks 2");
  const auto file = scratch_.path() / "runs/tiny/checkpoints/step-00000006/rank-00000.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  const auto ended = train("--ranks 2 --resume latest --set train.steps=8");
  EXPECT_EQ(ended.code, 0) << ended.err;
  expect_part(ended.err, "step-00000006 is broken, and the one before it is tried");
  expect_part(ended.err, "rank-00000.safetensors");
  expect_part(ended.err, "resumed after step 4 from runs/tiny/checkpoints/step-00000004");
  EXPECT_EQ(metrics("runs/tiny").size(), 8u);
}

// What can be seen without a look at all of its bytes is seen before anything starts.
TEST_F(CheckpointCommand, FilesThatCannotBeItsOwnAreRefusedAndNothingIsWritten) {
  trained("--ranks 2 --set checkpoint.keep=1");
  const std::string checkpoint = "runs/tiny/checkpoints/step-00000006";
  const auto file = scratch_.path() / checkpoint / "rank-00001.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  const std::uint64_t length = std::uint64_t{1} << 60;
  stream.write(reinterpret_cast<const char*>(&length), sizeof length);
  stream.close();
  const auto before = run_shell("ls -R " + scratch_.path().string()).output;
  const std::string more = " --set train.steps=9", words = "rank-00001.safetensors': a header of 1152921504606846976 bytes";
  expect_part(refused("--ranks 2 --resume " + checkpoint + more), words);
  expect_part(refused("--ranks 2 --resume latest" + more), words);
  expect_part(refused("--ranks 2 --resume latest" + more), "none of the checkpoints in 'runs/tiny' can be loaded");
  expect_part(refused("--ranks 2 --set checkpoint.weights=runs/tiny"), words);
  for (const char* verb : {"reshard runs/tiny whole", "diff runs/tiny runs/tiny"}) {
    const auto ended = scratch_.bonfire(std::string("checkpoint ") + verb);
    EXPECT_EQ(ended.code, 2);
    expect_part(ended.err, words);
  }
  EXPECT_EQ(run_shell("ls -R " + scratch_.path().string()).output, before);
}

// With weights that do not change, the loss of a step says which samples it has seen.
TEST_F(CheckpointCommand, DataAndPrecisionMayChangeOnTheWay) {
  for (const char* name : {"a", "b"}) {
    std::string text;
    for (int at = 0; at < 900; ++at) text += static_cast<char>(name[0] + at * at % 17);
    scratch_.write(std::string(name) + ".txt", text);
    ASSERT_EQ(scratch_.bonfire(fmt::format("tokens {0}.txt -o {0}.bin", name)).code, 0);
  }
  const std::string tokens = "--set data.type=tokens --set model.vocab=256 --set optimizer.lr=0 --set 'data.paths=",
                    one = tokens + "[\"a.bin\"]' ", both = tokens + "[\"a.bin\", \"b.bin\"]' ";
  trained("--ranks 1 --set run.name=whole " + both);
  trained("--ranks 2 --set train.steps=2 " + one);
  const auto before = metrics("runs/tiny");
  trained("--ranks 1 --resume latest --set train.steps=4 " + both);
  trained("--ranks 2 --resume latest --set train.steps=6 --set train.precision=bf16 " + both);
  const auto whole = metrics("runs/whole"), rest = metrics("runs/tiny");
  ASSERT_EQ(rest.size(), 6u);
  for (std::size_t at = 2; at < 6; ++at) {
    const double expected = whole[at].at("loss"), near = at < 4 ? 1e-6 : 1e-2;
    EXPECT_NEAR(rest[at].at("loss").get<double>(), expected, near * expected) << at;
  }
  EXPECT_NE(before[0].at("loss"), whole[0].at("loss"));  // other samples, then
  // Masters stay what they were, and so may the next precision be.
  const auto inspected = scratch_.bonfire("checkpoint inspect runs/tiny");
  expect_part(inspected.out, "F32");
  EXPECT_EQ(inspected.out.find("BF16"), std::string::npos) << inspected.out;
  trained("--ranks 2 --resume latest --set train.steps=7 --set train.precision=fp16 " + both);
  trained("--ranks 3 --resume latest --set train.steps=8 " + both);
}

// A rank is killed while it trains; the weights in the end are those of a run that nobody disturbed.
TEST_F(CheckpointCommand, ARestartGoesOnByItself) {
  // By its folder the run is told from any other on this machine.
  const std::string settings =
      fmt::format("--set train.steps=2000 --set checkpoint.every=50 --set run.folder={}/runs", scratch_.path().string());
  trained("--ranks 2 " + settings + " --set run.name=whole");
  // The ranks' own words have no --ranks; those of this shell have brackets.
  const auto ended =
      run_shell(fmt::format("cd {0}\n"
                            "timeout 120 {1}/bonfire train a.toml --ranks 2 {2} --max-restarts 1 >out.txt 2>err.txt &\n"
                            "until [ -e runs/tiny/checkpoints/latest ]; do kill -0 $! || exit 7; sleep 0.02; done\n"
                            "kill -KILL $(pgrep -n -f '[b]onfire train a.toml {2}') || exit 8\n"
                            "wait $!\n",
                            scratch_.path().string(), BONFIRE_BUILD_DIR, settings));
  EXPECT_EQ(ended.code, 0) << ended.output << scratch_.read("err.txt");
  const auto said = scratch_.read("err.txt");
  EXPECT_NE(said.find("resumed after step "), std::string::npos) << said.substr(0, 2000);
  const auto steps = metrics("runs/tiny");
  ASSERT_EQ(steps.size(), 2000u);
  for (std::size_t at = 0; at < steps.size(); ++at) EXPECT_EQ(steps[at].at("step"), at + 1);
  const auto same = scratch_.bonfire("checkpoint diff runs/whole runs/tiny");
  EXPECT_EQ(same.code, 0) << same.out << same.err;
}

// The three commands of the README, of a smaller model.
TEST_F(CheckpointCommand, TheReadmesCommandsResume) {
  std::ifstream in(BONFIRE_SOURCE_DIR "/README.md");
  std::vector<std::string> commands;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line == "## Stop and resume") inside = true;
    if (inside && line.starts_with("## ") && line != "## Stop and resume") break;
    if (inside && (line.starts_with("build/") || line.starts_with("kill "))) commands.push_back(line);
  }
  ASSERT_EQ(commands.size(), 3u);
  const auto smaller = [](std::string command) {
    const std::string from = "build/bonfire train examples/demo.toml";
    EXPECT_TRUE(command.starts_with(from)) << command;
    return BONFIRE_BUILD_DIR "/bonfire train a.toml" + command.substr(from.size());
  };
  commands[0] = smaller(commands[0].insert(commands[0].find(" &"), " --set train.steps=1000000"));
  commands[2] = smaller(
      commands[2].insert(commands[2].find("--resume"), "--set checkpoint.every=1000000 --set train.steps=$((S + 3)) "));
  const auto ended = run_shell(fmt::format(
      "cd {}\n{}\nuntil [ -e runs/tiny/checkpoints/latest ]; do kill -0 $! || exit 7; sleep 0.02; done\n{}\nwait $!\n"
      "S=$(sed 's/step-0*//' runs/tiny/checkpoints/latest)\n{}\n",
      scratch_.path().string(), commands[0], commands[1], commands[2]));
  EXPECT_EQ(ended.code, 0) << ended.output;
  expect_part(ended.output, "resumed after step ");
}

// A disk that is really full: training goes on, and what was saved before is whole.
TEST_F(CheckpointCommand, ADiskThatIsFullLeavesTheCheckpointsBefore) {
  fs::create_directory(scratch_.path() / "small");
  const auto said = run_shell(
      fmt::format("cd {0}\n"
                  "unshare -m sh -c 'mount -t tmpfs -o size=256k none small || exit 77\n"
                  "timeout 120 {1}/bonfire train a.toml --ranks 2 --set run.folder=small --set checkpoint.keep=0 --set "
                  "train.steps=12 2>err.txt || exit 1\n"
                  "for checkpoint in small/tiny/checkpoints/step-*[0-9]; do\n"
                  "  {1}/bonfire checkpoint verify $checkpoint || exit 2\n"
                  "done\n"
                  "ls -d small/tiny/checkpoints/*.part && exit 3\n"
                  "{1}/bonfire checkpoint inspect small/tiny'",
                  scratch_.path().string(), BONFIRE_BUILD_DIR));
  if (said.code == 77 || said.output.find("unshare failed") != std::string::npos)
    GTEST_SKIP() << "nothing may be mounted here";
  EXPECT_EQ(said.code, 0) << said.output << scratch_.read("err.txt");
  expect_part(scratch_.read("err.txt"), "could not be saved; the last checkpoint is of step ");
  expect_part(scratch_.read("err.txt"), "No space left on device");
}

TEST_F(CheckpointCommand, ReshardedItGoesOnAllTheSame) {
  trained("--ranks 2 --set layout.shard=2");
  const auto ended = scratch_.bonfire("checkpoint reshard runs/tiny whole --parts 1 --json");
  EXPECT_EQ(ended.code, 0) << ended.err;
  const auto said = nlohmann::json::parse(ended.out);
  EXPECT_EQ(said.at("parts"), 1);
  EXPECT_GT(said.at("bytes"), 0);
  EXPECT_EQ(scratch_.bonfire("checkpoint diff runs/tiny whole").code, 0);
  EXPECT_EQ(scratch_.bonfire("checkpoint verify whole").code, 0);
  const auto again = scratch_.bonfire("checkpoint reshard runs/tiny whole");
  EXPECT_EQ(again.code, 2);
  expect_part(again.err, "'whole' exists already");
  EXPECT_EQ(scratch_.bonfire("checkpoint reshard runs/tiny more --parts 0").code, 2);
  trained("--ranks 3 --resume whole --set train.steps=9 --set run.name=on");
  EXPECT_EQ(metrics("runs/on").front().at("step"), 7);
}

TEST_F(CheckpointCommand, ARunBeginsWithTheWeightsOfAnother) {
  trained("--ranks 1");
  trained("--ranks 2 --set run.name=tuned --set checkpoint.weights=runs/tiny --set 'checkpoint.weights_of=[\"blocks\"]'");
  const auto ended = train("--ranks 2 --set run.name=tuned --set checkpoint.weights=runs/tiny --set optimizer.lr=0");
  EXPECT_EQ(ended.code, 0) << ended.err;
  expect_part(ended.err, "weights of step 6 from runs/tiny/checkpoints/step-00000006");
  const auto before = run_shell("ls -R " + scratch_.path().string()).output;
  expect_part(refused("--set checkpoint.weights=runs/tiny --set model.ffn=64"), "of other shapes: ");
  expect_part(refused("--set checkpoint.weights=nowhere"), "checkpoint.weights = \"nowhere\"");
  EXPECT_EQ(run_shell("ls -R " + scratch_.path().string()).output, before);
}

// Manifests that somebody has made: nothing is believed, and nothing is written.
TEST_F(CheckpointCommand, ManifestsThatCannotBeAreRefusedInOneLine) {
  trained("--ranks 2 --set checkpoint.keep=1");
  const fs::path checkpoint = "runs/tiny/checkpoints/step-00000006", file = checkpoint / "manifest.json";
  // As version 1 had it, without a checksum of its text.
  auto good = nlohmann::ordered_json::parse(scratch_.read(file));
  good["version"] = 1;
  good.erase("checksum");
  using Json = nlohmann::ordered_json;
  struct Case {
    std::string words;
    std::function<void(Json&)> change;
  };
  const std::vector<Case> cases{{"", [](Json&) {}},
                                {"format version 99; this program reads versions 1 to 2: a newer Bonfire has written it",
                                 [](Json& all) { all["version"] = 99; }},
                                {"\"../elsewhere\" is not the name of a file in the checkpoint's own folder",
                                 [](Json& all) { all["tensors"][0]["pieces"][0]["file"] = "../elsewhere"; }},
                                {"some of its elements are there twice",
                                 [](Json& all) { all["tensors"][0]["pieces"].push_back(all["tensors"][0]["pieces"][0]); }},
                                {"elements are missing", [](Json& all) { all["tensors"][0]["pieces"].clear(); }},
                                {"is larger than any file",
                                 [](Json& all) {
                                   all["tensors"][0]["shape"] = {std::int64_t{1} << 40, std::int64_t{1} << 40};
                                 }},
                                {"is there twice", [](Json& all) { all["tensors"].push_back(all["tensors"][0]); }}};
  for (const auto& [words, change] : cases) {
    auto changed = good;
    change(changed);
    scratch_.write(file, changed.dump(1) + "\n");
    const auto before = contents();
    const auto inspected = scratch_.bonfire("checkpoint inspect " + checkpoint.string());
    if (words.empty()) {
      EXPECT_EQ(inspected.code, 0) << inspected.err;
      continue;
    }
    EXPECT_EQ(inspected.code, 2) << words;
    EXPECT_EQ(inspected.out, "") << words;
    EXPECT_EQ(inspected.err.find('\n'), inspected.err.size() - 1) << inspected.err;
    expect_part(inspected.err, words);
    for (const std::string& from : {checkpoint.string(), std::string("runs/tiny")})
      expect_part(refused("--ranks 2 --set train.steps=9 --resume " + from), words);
    EXPECT_EQ(contents(), before) << words;
  }
}

// Another user's files. Root may look at everything, so the command runs without that power.
TEST_F(CheckpointCommand, WhatMayNotBeReadIsRefusedInOneLine) {
  trained("--ranks 1 --set checkpoint.keep=1");
  const std::string other =
      geteuid() == 0 ? "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search"
                     : "";
  if (scratch_.bonfire("--version", other).code != 0) GTEST_SKIP() << "root cannot give up its power to read here";
  const std::string run = "runs/tiny", folder = run + "/checkpoints", checkpoint = folder + "/step-00000006";
  const std::string more = "train a.toml --ranks 1 --set train.steps=9 ";
  for (const std::string& closed :
       {checkpoint + "/rank-00000.safetensors", checkpoint + "/manifest.json", checkpoint, folder}) {
    std::vector<std::string> commands{"checkpoint verify " + run, "checkpoint diff " + run + " " + checkpoint,
                                      more + "--resume " + checkpoint, more + "--resume latest",
                                      more + "--set checkpoint.weights=" + run};
    // What a checkpoint contains stands in its manifest.
    if (!closed.ends_with(".safetensors")) commands.push_back("checkpoint inspect " + run);
    const auto before = contents();
    const auto mode = fs::status(scratch_.path() / closed).permissions();
    fs::permissions(scratch_.path() / closed, fs::perms::none);
    for (const auto& command : commands) {
      const auto ended = scratch_.bonfire(command, other);
      EXPECT_EQ(ended.code, 2) << closed << ": " << command << "\n" << ended.err;
      EXPECT_EQ(ended.out, "") << closed << ": " << command;
      EXPECT_EQ(ended.err.find('\n'), ended.err.size() - 1) << ended.err;
      expect_part(ended.err, closed);
      expect_part(ended.err, "Permission denied");
    }
    fs::permissions(scratch_.path() / closed, mode);
    EXPECT_EQ(contents(), before) << closed;
  }
}

TEST_F(CheckpointCommand, InspectVerifyAndDiff) {
  trained("--ranks 2");
  trained("--ranks 1 --set run.name=other --set train.steps=4");
  const auto inspected = scratch_.bonfire("checkpoint inspect runs/tiny");
  EXPECT_EQ(inspected.code, 0) << inspected.err;
  expect_part(inspected.out, "step-00000006: step 6, ");
  expect_part(inspected.out, "in 2 files");
  expect_part(inspected.out, "exp_avg_sq");
  expect_part(inspected.out, "blocks.0.");
  const auto json = nlohmann::json::parse(scratch_.bonfire("checkpoint inspect runs/tiny --json").out);
  EXPECT_EQ(json.at("step"), 6);
  EXPECT_EQ(json.at("state").at("run").at("samples"), 72);

  const auto good = scratch_.bonfire("checkpoint verify runs/tiny --json");
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(nlohmann::json::parse(good.out).at("ok"), true);
  EXPECT_EQ(scratch_.bonfire("checkpoint diff runs/tiny runs/tiny").code, 0);
  const auto other = scratch_.bonfire("checkpoint diff runs/tiny runs/other");
  EXPECT_EQ(other.code, 1) << other.out;
  expect_part(other.out, "elements differ, by at most");

  const auto file = scratch_.path() / "runs/tiny/checkpoints/step-00000006/rank-00001.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  const auto bad = scratch_.bonfire("checkpoint verify runs/tiny --json");
  EXPECT_EQ(bad.code, 1);
  EXPECT_EQ(nlohmann::json::parse(bad.out).at("ok"), false);
  expect_part(nlohmann::json::parse(bad.out).at("problems").at(0).get<std::string>(), "rank-00001.safetensors");
  EXPECT_EQ(scratch_.bonfire("checkpoint inspect nowhere").code, 2);
  EXPECT_EQ(scratch_.bonfire("checkpoint inspect runs").code, 2);
}

}  // namespace
}  // namespace bonfire::checkpoint_test
