// Law 8: modules, options, layouts and tables that nobody chose train as plain torch does on one rank, or are refused.
#include <gtest/gtest.h>

#include "tests/random/engine_case.h"
#include "tests/random/engine_run.h"
#include "tests/random/hunt.h"
#include "tests/random/pipeline_case.h"
#include "tests/random/pipeline_run.h"

namespace bonfire::cases::random_test {
namespace {

template <class Case>
void expect_well(const Kind<Case>& kind, int cases) {
  for (const auto& failure : hunt(kind, hunt_settings(cases)).failures) ADD_FAILURE() << failure;
}

TEST(Random, Engines) {
  expect_well<EngineCase>({.test = "Random.Engines", .draw = draw_engine_case, .run = run_engine_case}, 200);
}

// What is left out hides nothing: it is little, and drawn as everything else.
TEST(Random, AlmostAllEventsAreCompared) {
  Compared all;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const auto one = compared_events(draw_engine_case(seed));
    all.events += one.events;
    all.left_out += one.left_out;
  }
  EXPECT_GT(all.events, 800);
  EXPECT_LT(all.left_out, all.events / 50) << all.left_out << " of " << all.events;
}

TEST(Random, Pipelines) {
  expect_well<PipelineCase>({.test = "Random.Pipelines", .draw = draw_pipeline_case, .run = run_pipeline_case}, 100);
}

}  // namespace
}  // namespace bonfire::cases::random_test
