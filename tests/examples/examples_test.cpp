#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/support/shell.h"

namespace bonfire::examples_test {
namespace {

using testing::run_shell;

// The losses that an example prints, whoever started it.
std::vector<double> losses(const std::string& command) {
  const auto said = run_shell("timeout 300 " + command);
  EXPECT_EQ(said.code, 0) << command << "\n" << said.output;
  std::vector<double> values;
  const std::regex line("step [0-9]+  loss ([0-9.e+-]+)");
  for (std::sregex_iterator at(said.output.begin(), said.output.end(), line), end; at != end; ++at)
    values.push_back(std::stod((*at)[1]));
  EXPECT_EQ(values.size(), 3u) << command << "\n" << said.output;
  return values;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t at = 0; at < got.size(); ++at) EXPECT_NEAR(got[at], want[at], 1e-4 * want[at]);
}

class Example : public ::testing::TestWithParam<const char*> {
 protected:
  std::string program() const { return fmt::format("'{}/example_{}'", BONFIRE_BUILD_DIR, GetParam()); }
};

TEST_P(Example, LearnsAloneAndAlikeOnTwoAndFourRanks) {
  const auto alone = losses(program());
  ASSERT_EQ(alone.size(), 3u);
  EXPECT_LT(alone.back(), 0.5 * alone.front());
  for (const int ranks : {2, 4})
    expect_near(losses(fmt::format("'{}/bonfire' launch -n {} -- {}", BONFIRE_BUILD_DIR, ranks, program())), alone);
}

// One, two and four workers, and a server.
TEST(Examples, LearnWithAParameterServerAsTheyDoAlone) {
  const auto alone = losses(BONFIRE_BUILD_DIR "/example_data_parallel");
  for (const int ranks : {2, 3, 5})
    expect_near(
        losses(fmt::format("'{0}/bonfire' launch -n {1} -- '{0}/example_parameter_server'", BONFIRE_BUILD_DIR, ranks)),
        alone);
}

TEST(Examples, LearnInsideAnMpiProgramAsTheyDoAlone) {
#ifdef BONFIRE_MPIEXEC
  const auto alone = losses(BONFIRE_BUILD_DIR "/example_data_parallel");
  const auto together =
      losses(BONFIRE_MPIEXEC " -n 2 --allow-run-as-root --oversubscribe " BONFIRE_BUILD_DIR "/example_inside_mpi");
  expect_near(together, alone);
#else
  GTEST_SKIP() << "no MPI was found";
#endif
}

// Killed once something is saved, and continued on one rank and on two, it ends where an undisturbed run does.
TEST(Examples, ThatAreKilledContinueWhereTheySaved) {
  const testing::Folder folder;
  const std::string program = "'" BONFIRE_BUILD_DIR "/example_checkpoint' ", interrupted = folder / "interrupted";
  const auto killed = run_shell(fmt::format(
      "{0} {1} 1000000000 & until [ -e {1}/latest ]; do kill -0 $! || exit 7; sleep 0.02; done; kill -KILL $!; wait $!",
      program, interrupted));
  ASSERT_EQ(killed.code, 137) << killed.output;
  std::string latest = run_shell("cat " + interrupted + "/latest").output;
  const auto steps = std::stoll(latest.substr(5)) + 70;
  const auto undisturbed = losses(fmt::format("{} {} {}", program, folder / "undisturbed", steps));
  for (const char* launcher : {"", "'" BONFIRE_BUILD_DIR "/bonfire' launch -n 2 -- "}) {
    run_shell(fmt::format("rm -rf {0}2; cp -r {0} {0}2", interrupted));
    expect_near(losses(fmt::format("{}{} {}2 {}", launcher, program, interrupted, steps)), undisturbed);
  }
}

// A checkpoint of one example is what another one adapts, alone and on two ranks; that saves the adapters alone.
TEST(Examples, AdaptersLearnOverACheckpoint) {
  const testing::Folder folder;
  const auto begun =
      run_shell(fmt::format("timeout 100 '" BONFIRE_BUILD_DIR "/example_checkpoint' {} 300", folder / "base"));
  ASSERT_EQ(begun.code, 0) << begun.output;
  std::vector<double> alone;
  for (const char* launcher : {"", "'" BONFIRE_BUILD_DIR "/bonfire' launch -n 2 -- "}) {
    const auto to = folder / (*launcher ? "two" : "one");
    const auto seen =
        losses(fmt::format("{}'" BONFIRE_BUILD_DIR "/example_adapters' {}/step-00000300 {}", launcher, folder / "base", to));
    if (alone.empty()) alone = seen;
    ASSERT_EQ(alone.size(), 3u);
    EXPECT_LT(alone.back(), 0.2 * alone.front());
    expect_near(seen, alone);
    const auto shown = run_shell(fmt::format("'" BONFIRE_BUILD_DIR "/bonfire' checkpoint inspect {}/step-00000151", to));
    EXPECT_NE(shown.output.find("hidden0.adapter.a"), std::string::npos) << shown.output;
    EXPECT_NE(shown.output.find("state base: checksum = "), std::string::npos) << shown.output;
    EXPECT_EQ(shown.output.find("hidden0.weight"), std::string::npos) << shown.output;
  }
}

// The lines of an example that a compiler sees.
std::vector<std::string> code_of(const std::string& example) {
  std::ifstream file(fmt::format("{}/examples/{}.cpp", BONFIRE_SOURCE_DIR, example));
  EXPECT_TRUE(file.good()) << example;
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);)
    if (line.find_first_not_of(' ') != std::string::npos && !line.starts_with("//")) lines.push_back(line);
  return lines;
}

TEST(Examples, FullyShardedIsDataParallelButForTwoLines) {
  const auto one = code_of("data_parallel"), other = code_of("fully_sharded");
  EXPECT_GT(one.size(), 15u);
  // As diff counts: what is in neither's longest common subsequence.
  std::vector<std::vector<std::size_t>> common(one.size() + 1, std::vector<std::size_t>(other.size() + 1));
  for (std::size_t i = 0; i < one.size(); ++i)
    for (std::size_t j = 0; j < other.size(); ++j)
      common[i + 1][j + 1] = one[i] == other[j] ? common[i][j] + 1 : std::max(common[i][j + 1], common[i + 1][j]);
  const auto same = common.back().back();
  EXPECT_LE(one.size() - same, 2u);
  EXPECT_LE(other.size() - same, 2u);
  EXPECT_GT(other.size() - same, 0u) << "both are the same program";
}

// The same weights and samples: sharded or not, the loss is the same.
TEST(Examples, FullyShardedLearnsAsDataParallelDoes) {
  const auto launch = [](const char* example) {
    return losses(fmt::format("'{0}/bonfire' launch -n 2 -- '{0}/example_{1}'", BONFIRE_BUILD_DIR, example));
  };
  expect_near(launch("fully_sharded"), launch("data_parallel"));
}

TEST(Examples, WhatIsFrozenHasNoOptimizerState) {
  const auto said =
      run_shell(fmt::format("timeout 100 '{0}/bonfire' launch -n 2 -- '{0}/example_fine_tune'", BONFIRE_BUILD_DIR));
  std::vector<double> bytes;
  const std::regex state("all ranks: ([0-9]+) bytes");
  for (std::sregex_iterator at(said.output.begin(), said.output.end(), state), end; at != end; ++at)
    bytes.push_back(std::stod((*at)[1]));
  ASSERT_EQ(bytes.size(), 3u) << said.output;
  EXPECT_EQ(bytes[0], bytes[1]);  // before it thaws
  EXPECT_GT(bytes[2], 3 * bytes[1]);
}

INSTANTIATE_TEST_SUITE_P(All, Example,
                         ::testing::Values("big_model", "data_parallel", "fine_tune", "fully_sharded", "pipeline",
                                           "plain_torch_optimizer", "split_layers", "torch_data"));

}  // namespace
}  // namespace bonfire::examples_test
