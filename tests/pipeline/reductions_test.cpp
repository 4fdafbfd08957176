// Tables with REDUCE cells of their own: gradients are those of one rank, or the table is refused before anything runs.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/validate.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::reductions_test {
namespace {

using schedule::Kind;
using schedule::Schedule;
using testing::PipelineRun;
using testing::run_ranks;

// After the backwards of these numbers of a stage, counted from 1, and after its last.
Schedule with_reductions(Schedule table, int every) {
  for (auto& row : table.rows) {
    std::map<int, int> done;
    std::vector<schedule::Action> cells;
    for (const auto& action : row) {
      cells.push_back(action);
      if (!schedule::ends_activation(action.kind)) continue;
      const int count = ++done[action.stage];
      if (count % every == 0 || count == table.microbatches) cells.push_back({action.stage, Kind::reduce});
    }
    row = std::move(cells);
  }
  return table;
}

struct Way {
  const char* name;
  MeshShape shape;
  Sharded what;
  Accumulation accumulation = Accumulation::sharded;
  // Ranks have whole gradients and average a part of them: only one reduction will do.
  bool once = false;
};

class OwnReductions : public ::testing::TestWithParam<Way> {};

TEST_P(OwnReductions, GiveTheGradientsOfOneRankOrAreRefused) {
  const auto& way = GetParam();
  constexpr int microbatches = 4;
  auto spec = testing::tiny_models()[2].spec;  // gpt2, tied
  spec.layers = 4;
  PipelineRun run{.spec = spec, .shape = way.shape, .microbatches = microbatches, .clip = 0};
  run.shard.what = way.what;
  run.shard.accumulation = way.accumulation;
  const auto plain = testing::train_plainly(run);
  for (const std::string name : {"1f1b", "zb-h1", "interleaved"})
    for (const int every : {1, 2, 3, microbatches}) {
      const auto base = schedule::generate(
          name,
          {.ranks = way.shape.pipeline, .microbatches = microbatches, .chunks = schedule::natural_chunks(name.c_str())});
      auto with = run;
      with.table = with_reductions(base, every);
      SCOPED_TRACE(fmt::format("{}, {}, a reduction after every {} backwards", way.name, name, every));
      if (way.once && every < microbatches) {
        const auto chain = testing::chain_of_model(spec, {});
        try {
          pipeline_table(chain, {.schedule = *with.table, .schedule_name = "mine.txt", .shard = run.shard},
                         {way.shape.replicate, way.shape.shard});
          ADD_FAILURE() << "accepted";
        } catch (const schedule::ScheduleError& error) {
          const std::string words = error.what();
          EXPECT_NE(words.find("REDUCE': the gradient of"), std::string::npos) << words;
          EXPECT_NE(words.find("gradients are kept whole"), std::string::npos) << words;
          EXPECT_NE(words.find("after the stage's last backward, or sharded gradients"), std::string::npos) << words;
          EXPECT_NE(error.table().find("REDUCE]"), std::string::npos) << error.table();
        }
        continue;
      }
      run_ranks(way.shape.size(),
                [&](World& world) { testing::expect_parity(testing::train_pipeline(world, with), plain, 1e-12); });
    }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, OwnReductions,
    ::testing::Values(Way{"replicas", {.pipeline = 2, .replicate = 2}, Sharded::none},
                      Way{"optimizer", {.pipeline = 2, .shard = 2}, Sharded::optimizer, Accumulation::sharded, true},
                      Way{"gradients", {.pipeline = 2, .shard = 2}, Sharded::gradients},
                      Way{"gradients_whole", {.pipeline = 2, .shard = 2}, Sharded::gradients, Accumulation::full, true},
                      Way{"parameters", {.pipeline = 2, .shard = 2}, Sharded::parameters},
                      Way{"hybrid", {.pipeline = 2, .replicate = 2, .shard = 2}, Sharded::gradients},
                      Way{"one_rank_a_stage", {.pipeline = 2}, Sharded::gradients}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace bonfire::reductions_test
