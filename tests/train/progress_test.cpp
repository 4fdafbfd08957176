#include "bonfire/train/progress.h"

#include <gtest/gtest.h>

#include <vector>

namespace bonfire::progress_test {
namespace {

// A line, a screen and a clock that the test moves.
struct Screen {
  std::vector<std::string> written;
  Nanoseconds time = 1'000'000'000;

  ProgressLine::Options options(bool terminal) {
    return {.steps = 100,
            .every = 10,
            .terminal = terminal,
            .write = [this](std::string_view text) { written.emplace_back(text); },
            .now = [this] { return time; }};
  }
};

StepMetrics at(std::int64_t step) {
  return {.step = step, .loss = 4.123451, .grad_norm = 1.23454, .tokens_per_second = 12345.4, .memory_bytes = 13250000000};
}

TEST(Progress, ALineAsPeopleKnowIt) {
  EXPECT_EQ(step_line(at(10)), "step: 10  loss: 4.12345  grad_norm: 1.2345  memory: 12.34GiB  tps: 12,345");
  auto more = at(10);
  more.skipped = 3;
  more.eval_loss = 2;
  EXPECT_TRUE(step_line(more).ends_with("tps: 12,345  eval_loss: 2.00000  skipped: 3"));
}

TEST(Progress, ALogHasALineEveryFewStepsAndTheFirstAndLast) {
  Screen screen;
  {
    ProgressLine progress(screen.options(false));
    for (std::int64_t step = 1; step <= 95; ++step) progress.step_done(at(step));
    auto evaluated = at(96);
    evaluated.eval_loss = 2;
    progress.step_done(evaluated);
    for (std::int64_t step = 97; step <= 100; ++step) progress.step_done(at(step));
    progress.clear();
  }
  ASSERT_EQ(screen.written.size(), 12);
  EXPECT_EQ(screen.written[0], step_line(at(1)) + "\n");
  for (int line = 1; line <= 9; ++line) EXPECT_EQ(screen.written[line], step_line(at(10 * line)) + "\n");
  EXPECT_TRUE(screen.written[10].starts_with("step: 96"));
  EXPECT_EQ(screen.written[11], step_line(at(100)) + "\n");
}

TEST(Progress, ATerminalIsDrawnInPlaceAtMostTenTimesASecond) {
  Screen screen;
  {
    ProgressLine progress(screen.options(true));
    for (std::int64_t step = 1; step <= 100; ++step) {
      screen.time += 10'000'000;
      progress.step_done(at(step));
    }
  }
  // Steps 1, 11, 21, ..., 91 and the last; then the end of the line.
  ASSERT_EQ(screen.written.size(), 12);
  for (std::size_t draw = 0; draw < 11; ++draw) {
    const auto& line = screen.written[draw];
    EXPECT_TRUE(line.starts_with("\r[")) << line;
    EXPECT_TRUE(line.ends_with("\033[K")) << line;
    EXPECT_EQ(line.find('\n'), std::string::npos);
    EXPECT_LT(line.size() - 4, 80);
  }
  EXPECT_NE(screen.written[5].find("51/100  loss 4.1235  12,345 tokens/s  left 490.00 ms"), std::string::npos)
      << screen.written[5];
  EXPECT_NE(screen.written[5].find("[============            ]"), std::string::npos) << screen.written[5];
  EXPECT_NE(screen.written[10].find("100/100"), std::string::npos);
  EXPECT_NE(screen.written[10].find("took 1.0 s"), std::string::npos) << screen.written[10];
  EXPECT_EQ(screen.written[11], "\n");
}

TEST(Progress, NeverWiderThanTheTerminalAndOutOfTheWayWhenAsked) {
  Screen screen;
  auto options = screen.options(true);
  options.columns = [] { return 20; };
  options.first_step = 50;
  ProgressLine progress(options);
  progress.clear();
  EXPECT_TRUE(screen.written.empty());
  progress.step_done(at(51));
  EXPECT_EQ(screen.written.at(0).size(), 1 + 19 + 3);
  progress.clear();
  progress.clear();
  EXPECT_EQ(screen.written.size(), 2);
  EXPECT_EQ(screen.written.at(1), "\r\033[K");
  progress.step_done(at(52));  // drawn at once, whatever the time
  EXPECT_EQ(screen.written.size(), 3);
}

TEST(Progress, AWindowThatIsMadeNarrowerKeepsOneBar) {
  Screen screen;
  auto options = screen.options(true);
  int columns = 80;
  options.columns = [&] { return columns; };
  ProgressLine progress(options);
  const auto draw = [&](std::int64_t step, int width) {
    columns = width;
    screen.time += 1'000'000'000;
    progress.step_done(at(step));
    return screen.written.back();
  };
  draw(1, 80);
  const auto narrowed = draw(2, 30);
  EXPECT_TRUE(narrowed.starts_with("\n[")) << "drawn over a line that has wrapped: " << narrowed;
  EXPECT_EQ(narrowed.size(), 1 + 29 + 3);
  EXPECT_TRUE(draw(3, 30).starts_with("\r["));
  const auto widened = draw(4, 100);
  EXPECT_TRUE(widened.starts_with("\r[")) << widened;
  EXPECT_GT(widened.size(), 40);
}

}  // namespace
}  // namespace bonfire::progress_test
