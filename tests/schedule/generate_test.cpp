#include "bonfire/schedule/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bonfire/base/error.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"

namespace bonfire::schedule::generate_test {
namespace {

// All shapes for which a schedule exists, of a small size.
std::vector<Shape> shapes_of(const std::string& name) {
  std::vector<Shape> shapes;
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (int microbatches = 1; microbatches <= 16; ++microbatches) {
      for (const int chunks : {1, 2, 3}) {
        const bool many = name == "naive" || name == "gpipe" || name == "interleaved";
        if (name == "zb-v" ? chunks != 2 : (!many && chunks != 1)) continue;
        if (name == "interleaved" && microbatches % ranks != 0) continue;
        shapes.push_back({ranks, microbatches, chunks});
      }
    }
  }
  return shapes;
}

std::string words(const Shape& shape) {
  return fmt::format("{} ranks, {} microbatches, {} chunks", shape.ranks, shape.microbatches, shape.chunks);
}

TEST(Generate, EverySchedulePassesTheValidatorAlsoWithItsMessages) {
  for (const auto& name : schedule_names()) {
    for (const Shape& shape : shapes_of(name)) {
      const Schedule schedule = generate(name, shape);
      EXPECT_EQ(schedule.ranks(), shape.ranks);
      EXPECT_EQ(schedule.stages, shape.ranks * shape.chunks);
      EXPECT_NO_THROW(validate(schedule, name)) << words(shape);
      EXPECT_NO_THROW(validate(lower(schedule), name)) << words(shape);
    }
  }
}

// tests/schedule/tables/NAME_RANKSxMICROBATCHES.txt, such as zb-h1_4x8.txt, were printed by this code once: they show each
// schedule to a reader and catch a change that nobody meant. That the schedules are right is for the other tests.
TEST(Generate, TablesAreAsExpected) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(BONFIRE_SOURCE_DIR "/tests/schedule/tables")) {
    const std::string stem = entry.path().stem();
    const auto underscore = stem.rfind('_'), cross = stem.rfind('x');
    const std::string name = stem.substr(0, underscore);
    const Schedule schedule = generate(name, {.ranks = std::stoi(stem.substr(underscore + 1)),
                                              .microbatches = std::stoi(stem.substr(cross + 1)),
                                              .chunks = natural_chunks(name)});
    EXPECT_EQ(read_table(entry.path()), schedule) << entry.path();
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    EXPECT_EQ(text.str(), table_text(schedule, simulate(schedule)));
    ++files;
  }
  EXPECT_EQ(files, static_cast<int>(schedule_names().size()));
}

// With p ranks and m microbatches, a forward of f and a backward of b: all ranks work m (f + b) and the step takes
// (p - 1) (f + b) more. Times are sums of whole numbers, so equality is exact.
TEST(ClosedForm, GpipeAndOneFOneBWaitForOneMicrobatchPerOtherRank) {
  for (const std::string name : {"gpipe", "1f1b"}) {
    for (const Shape& shape : shapes_of(name)) {
      if (shape.chunks > 1) continue;
      for (const auto& [f, b] : {std::pair(1.0, 2.0), std::pair(3.0, 5.0), std::pair(4.0, 1.0)}) {
        const Timeline timeline = simulate(generate(name, shape), StageCosts{.forward = f, .backward = b});
        const double p = shape.ranks, m = shape.microbatches;
        EXPECT_EQ(timeline.makespan, (m + p - 1) * (f + b)) << name << ": " << words(shape);
        EXPECT_EQ(timeline.bubble, (p - 1) / (m + p - 1)) << name << ": " << words(shape);
      }
    }
  }
}

TEST(ClosedForm, ChunksDivideTheBubbleOfTheInterleavedSchedule) {
  for (const Shape& shape : shapes_of("interleaved")) {
    for (const auto& [f, b] : {std::pair(1.0, 2.0), std::pair(3.0, 5.0)}) {
      const Timeline timeline = simulate(interleaved(shape), StageCosts{.forward = f, .backward = b});
      const double p = shape.ranks, m = shape.microbatches, v = shape.chunks;
      // A chunk is 1/v of a rank's work, so (p - 1) chunks are (p - 1) / v microbatches.
      EXPECT_EQ(timeline.makespan, (m * v + p - 1) * (f + b)) << words(shape);
      EXPECT_DOUBLE_EQ(timeline.bubble, ((p - 1) / v) / (m + (p - 1) / v)) << words(shape);
    }
  }
}

TEST(ClosedForm, NaiveUsesOneRankAtATime) {
  for (const Shape& shape : shapes_of("naive")) {
    const Timeline timeline = simulate(naive(shape));
    EXPECT_EQ(timeline.makespan, 3 * shape.microbatches * shape.ranks * shape.chunks);
    EXPECT_DOUBLE_EQ(timeline.bubble, 1.0 - 1.0 / shape.ranks);
  }
}

// Within one step nobody can do better than the last rank that waits for its first input: (p - 1) f.
TEST(ClosedForm, ZeroBubbleWaitsOnlyForTheFirstInput) {
  for (const Shape& shape : shapes_of("zb-h1")) {
    const double p = shape.ranks, m = shape.microbatches;
    if (m >= p) {
      EXPECT_EQ(simulate(zb_h1(shape)).makespan, 3 * m + p - 1) << words(shape);
    }
    if (m >= 2 * p - 1) {
      const Timeline timeline = simulate(zb_h2(shape));
      EXPECT_EQ(timeline.makespan, 3 * m + p - 1) << words(shape);
      for (int rank = 0; rank < shape.ranks; ++rank) EXPECT_EQ(timeline.occupied(rank), 3 * m) << words(shape);
    }
  }
  for (const Shape& shape : shapes_of("zb-v")) {
    const double p = shape.ranks, m = shape.microbatches;
    if (m >= 2 * p - 1) {
      EXPECT_EQ(simulate(zb_v(shape)).makespan, 6 * m + p - 1) << words(shape);
    }
  }
  EXPECT_EQ(simulate(zb_h2({.ranks = 4, .microbatches = 24})).bubble, 0.04);
}

// Of the paper: (p - 1) (f + i - w) for H1 and (p - 1) (f + i - 2w) for H2, where w is small enough.
TEST(ClosedForm, ZeroBubbleWithUnequalCosts) {
  for (const int p : {2, 4, 8}) {
    const Shape shape{.ranks = p, .microbatches = 4 * p};
    const double f = 8, i = 7, w = 5, work = shape.microbatches * (f + i + w);
    const StageCosts costs{.forward = f, .input_gradient = i, .weight_gradient = w};
    const auto longest = [&](const Timeline& timeline) {
      double result = 0;
      for (int rank = 0; rank < p; ++rank) result = std::max(result, timeline.occupied(rank));
      return result;
    };
    EXPECT_EQ(longest(simulate(zb_h1(shape), costs)), work + (p - 1) * (f + i - w));
    EXPECT_EQ(simulate(zb_h1(shape), costs).makespan, work + (p - 1) * (f + i - w));
    EXPECT_EQ(longest(simulate(zb_h2(shape), costs)), work + (p - 1) * (f + i - 2 * w));
  }
}

// What a rank keeps at most: exact where the shape is large enough for the schedule's full pattern.
int expected_peak(const std::string& name, const Shape& shape, int rank) {
  const auto [p, m, v] = shape;
  if (name == "naive") return v;
  if (name == "gpipe") return m * v;
  if (name == "1f1b" || (name == "interleaved" && v == 1)) return std::min(p - rank, m);
  if (name == "interleaved") return std::min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1);
  if (name == "zb-h1") return std::min(p, m);
  if (name == "zb-h2") return std::min(2 * p - 1, m);
  return 2 * p;  // zb-v: of half the size each, so as much as 1F1B
}

TEST(ClosedForm, PeakActivations) {
  for (const auto& name : schedule_names()) {
    for (const Shape& shape : shapes_of(name)) {
      const auto peaks = peak_activations(generate(name, shape));
      const bool full = name != "zb-v" || shape.microbatches >= 2 * shape.ranks - 1;
      for (int rank = 0; rank < shape.ranks; ++rank) {
        const int expected = expected_peak(name, shape, rank);
        EXPECT_LE(peaks[rank], expected) << name << ", rank " << rank << ": " << words(shape);
        EXPECT_TRUE(!full || peaks[rank] == expected) << name << ", rank " << rank << ": " << words(shape);
      }
    }
  }
}

void expect_refused(const std::string& name, Shape shape, const std::string& line) {
  try {
    generate(name, shape);
    FAIL() << name << " exists for " << words(shape);
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.what(), line);
  }
}

TEST(Generate, SaysWhatIsAllowed) {
  expect_refused("interleaved", {4, 6, 2},
                 "schedule interleaved: 6 microbatches on 4 ranks; allowed: a multiple of the ranks, such as 4 or 8");
  expect_refused("interleaved", {4, 3, 2},
                 "schedule interleaved: 3 microbatches on 4 ranks; allowed: a multiple of the ranks, such as 4");
  expect_refused("1f1b", {4, 8, 2}, "schedule 1f1b: 2 chunks; allowed: 1 (stages per rank); interleaved takes more");
  expect_refused("zb-v", {4, 8, 1}, "schedule zb-v: 1 chunks; allowed: 2 (stages per rank)");
  expect_refused("gpipe", {0, 8, 1}, "schedule gpipe: 0 ranks; allowed: 1 or more");
  expect_refused("gpipe", {4, -1, 1}, "schedule gpipe: -1 microbatches; allowed: 1 or more");
  expect_refused("1f1b", {1 << 20, 1 << 20, 1},
                 "schedule 1f1b: 1048576 ranks x 1 chunks x 1048576 microbatches; allowed: at most 67108864 in all");
  expect_refused("2f2b", {4, 8, 1}, "schedule '2f2b'; allowed: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v");
}

}  // namespace
}  // namespace bonfire::schedule::generate_test
