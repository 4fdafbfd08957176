#include <string>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/plan/unit_window.h"

namespace bonfire::plan::unit_window_test {
namespace {

// What a stage gathers (g) and frees (f) in one forward and one backward.
std::string order(std::vector<StepUnit> units, const DataParallel& layout, bool knows_order = true) {
  std::string log;
  UnitWindow window(std::move(units), {false, true}, layout,
                    {.gather = [&](std::size_t flat, std::int64_t) { log += fmt::format("g{} ", flat); },
                     .let_go = [&](std::size_t flat) { log += fmt::format("f{} ", flat); }});
  window.begin(knows_order);
  window.run(false);
  log += "| ";
  window.run(true);
  return log;
}

TEST(UnitWindow, GathersRunAheadAndWhatIsNeededNextStays) {
  const std::vector<StepUnit> three{{.flat = 0}, {.flat = 1}, {.flat = 2}};
  EXPECT_EQ(order(three, {.prefetch = 0}), "g0 f0 g1 f1 g2 | f2 g1 f1 g0 f0 ");
  EXPECT_EQ(order(three, {.prefetch = 1}), "g0 g1 f0 g2 f1 g1 | f2 g0 f1 f0 ");
  EXPECT_EQ(order(three, {.prefetch = 1, .backward_prefetch = BackwardPrefetch::after_reduction}),
            "g0 g1 f0 g2 f1 g1 | f2 f1 g0 f0 ")
      << "in backward nothing is gathered before a Unit has been freed";
  EXPECT_EQ(order(three, {.prefetch = 1}, /*knows_order=*/false), "g0 f0 g1 f1 g2 f2 | g2 f2 g1 f1 g0 f0 ");
}

TEST(UnitWindow, TheRootStaysAndFrozenUnitsHaveNoBackward) {
  const std::vector<StepUnit> units{{.flat = 3, .root = true}, {.flat = 0, .backward = false}, {}, {.flat = 1}};
  EXPECT_EQ(order(units, {.prefetch = 0}), "g3 g0 f0 g1 | f1 f3 ");
}

}  // namespace
}  // namespace bonfire::plan::unit_window_test
