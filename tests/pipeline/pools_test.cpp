// The stages of a rank share their buffers: what is held for gathered parameters and for whole gradients is what the table
// has in at once, not so much for each stage.
#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/plan/loans.h"
#include "bonfire/schedule/generate.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::pools_test {
namespace {

using schedule::Kind;
using testing::run_ranks;

// What pools come to hold that go through a row cell by cell, with one list of whole gradients on their way for all stages.
class Walk {
 public:
  Walk(Pipeline& pipeline, std::size_t limit) : pipeline_(pipeline), limit_(limit) {}

  // The agreement on what crosses the cuts takes stage by stage in.
  void probe() {
    for (const int stage : pipeline_.local_stages()) step({{stage, Kind::unshard}, {stage, Kind::reshard}});
  }
  void step(const std::vector<schedule::Action>& row) {
    for (const auto& action : row) {
      const auto& flats = pipeline_.engine(action.stage).flats();
      for (std::size_t at = 0; at < flats.size(); ++at) {
        const Key key{action.stage, at};
        if (action.kind == Kind::unshard)
          gathered_[key] = parameters_.borrow(flats[at]->layout().bytes,
                                              (std::int64_t{action.stage} << 20) + static_cast<std::int64_t>(at));
        if (action.kind == Kind::reshard) parameters_.give_back(gathered_.at(key));
        if (schedule::ends_activation(action.kind)) {
          make_room();
          flights_.push_back({action.stage, gradients_.borrow(flats[at]->layout().trained_elements() * 4)});
        }
      }
      if (action.kind == Kind::update)
        for (auto flight = flights_.begin(); flight != flights_.end();)
          flight = flight->first == action.stage ? land(flight) : std::next(flight);
    }
  }
  std::int64_t bytes() const { return parameters_.bytes() + gradients_.bytes(); }
  std::int64_t parameters() const { return parameters_.bytes(); }

 private:
  using Key = std::pair<int, std::size_t>;
  using Flights = std::deque<std::pair<int, std::size_t>>;  // stage and loan
  void make_room() {
    while (flights_.size() >= limit_) land(flights_.begin());
  }
  Flights::iterator land(Flights::iterator flight) {
    gradients_.give_back(flight->second);
    return flights_.erase(flight);
  }

  Pipeline& pipeline_;
  std::size_t limit_;
  plan::Loans parameters_, gradients_;
  std::map<Key, std::size_t> gathered_;
  Flights flights_;
};

TEST(Pools, AreOneForAllStagesOfARank) {
  auto spec = testing::tiny_models()[3].spec;  // llama
  spec.layers = 14;
  for (const int chunks : {1, 2, 4})
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.pipeline = 2, .shard = 2});
      PipelineOptions options{.schedule = schedule::generate(chunks == 1 ? "1f1b" : "interleaved",
                                                             {.ranks = 2, .microbatches = 4, .chunks = chunks})};
      options.shard.what = Sharded::parameters;
      Pipeline pipeline(mesh, testing::chain_of_model(spec, {.dtype = at::kFloat}), options);
      std::vector<std::unique_ptr<Sgd>> optimizers;
      for (const int stage : pipeline.local_stages())
        optimizers.push_back(std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = 0.01}));
      const auto& row = pipeline.table().rows[static_cast<std::size_t>(mesh.coordinate(Axis::pipeline))];
      Walk walk(pipeline, static_cast<std::size_t>(std::max(2, options.shard.prefetch + 1)));
      walk.probe();
      for (int step = 0; step < 4; ++step) {
        std::vector<Microbatch> batch;
        for (int at = 0; at < 4; ++at) {
          const auto [input, target] = testing::tiny_data(spec, step, 3 * at, 3);
          batch.push_back({.input = {input}, .target = {target}});
        }
        pipeline.step(batch);
        for (auto& optimizer : optimizers) optimizer->step();
        walk.step(row);
      }
      SCOPED_TRACE(fmt::format("{} chunks, rank {}", chunks, world.rank()));
      const auto& local = pipeline.local_stages();
      std::vector<std::int64_t> whole;
      for (const int stage : local) {
        EXPECT_EQ(pipeline.engine(stage).pool_bytes(), walk.bytes());
        whole.push_back(0);
        for (const auto& flat : pipeline.engine(stage).flats()) whole.back() += flat->layout().bytes;
      }
      // Two stages are in at once.
      std::sort(whole.rbegin(), whole.rend());
      EXPECT_LE(walk.parameters(), whole[0] + (whole.size() > 1 ? whole[1] : 0) + 512 * 16);
    });
}

}  // namespace
}  // namespace bonfire::pools_test
