// Law 8: modules, options, layouts and tables that nobody chose train as plain torch does on one rank, or are refused.
#include <gtest/gtest.h>

#include "tests/random/engine_case.h"
#include "tests/random/engine_run.h"
#include "tests/random/hunt.h"
#include "tests/random/pipeline_case.h"
#include "tests/random/pipeline_run.h"

namespace bonfire::cases {
namespace {

template <class Case>
void expect_well(const Kind<Case>& kind, int cases) {
  for (const auto& failure : hunt(kind, hunt_settings(cases)).failures) ADD_FAILURE() << failure;
}

TEST(Random, Engines) {
  expect_well<EngineCase>({.test = "Random.Engines", .draw = draw_engine_case, .run = run_engine_case}, 200);
}

TEST(Random, Pipelines) {
  expect_well<PipelineCase>({.test = "Random.Pipelines", .draw = draw_pipeline_case, .run = run_pipeline_case}, 100);
}

}  // namespace
}  // namespace bonfire::cases
