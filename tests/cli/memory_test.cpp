#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/cli/random_run.h"

// What a rank needs is known before it starts: the predicted and the measured peak of runs that nobody chose.
//
// BONFIRE_MEMORY_RUNS says how many (docs/memory.md says how to run 100), BONFIRE_MEMORY_SEED which.
namespace bonfire {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

// 5% of the peak. Of a run that needs less than 16 MiB, 5% of that: libraries have a few hundred kilobytes of their own.
constexpr double part_allowed = 0.05;
constexpr double small_run = 16 << 20;

TEST(RandomRuns, NeedWhatWasPredicted) {
  const testing::Scratch scratch;
  scratch.write("a.toml", "[run]\ndevice = \"cpu\"\n");
  const auto runs = from_environment("BONFIRE_MEMORY_RUNS", 2);
  const auto first = from_environment("BONFIRE_MEMORY_SEED", 111);
  int within = 0;
  for (auto seed = first; seed < first + runs; ++seed) {
    const testing::RandomRun run(static_cast<std::uint64_t>(seed));
    const auto ended = scratch.bonfire("bench step a.toml --steps 2 --json" + run.arguments());
    EXPECT_EQ(ended.code, 0) << "seed " << seed << ": " << run.line() << "\n" << ended.err;
    if (ended.code != 0) continue;
    const auto report = nlohmann::json::parse(ended.out);
    const double measured = report.at("peak_memory_bytes"), predicted = report.at("predicted_memory_bytes");
    const double off = std::abs(predicted - measured);
    const bool good = off <= part_allowed * std::max(measured, small_run);
    EXPECT_TRUE(good) << "seed " << seed << ": " << predicted << " predicted, " << measured << " measured ("
                      << predicted / measured << ")\n"
                      << run.line();
    within += good;
    if (runs > 20)
      fmt::print("{:>5} {:>11} {:>11} {:>7.4f} {} {}\n", seed, predicted, measured, predicted / measured, good ? "  " : "!!",
                 run.line());
  }
  EXPECT_EQ(within, runs);
}

}  // namespace
}  // namespace bonfire
