#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tests/support/shell.h"

namespace bonfire {
namespace {

using testing::run_shell;

// The losses that an example prints, whoever started it.
std::vector<double> losses(const std::string& command) {
  const auto said = run_shell("timeout 100 " + command);
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

INSTANTIATE_TEST_SUITE_P(All, Example, ::testing::Values("data_parallel", "plain_torch_optimizer"));

}  // namespace
}  // namespace bonfire
