#include "bonfire/pipeline/pipedream.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipedream_row.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/text.h"
#include "tests/pipeline/pipedream_oracle.h"
#include "tests/pipeline/pipedream_trained.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"

// PipeDream's modes against their equations.
namespace bonfire::pipedream_test {
namespace {

using schedule::WeightMode;
using testing::expect_weights;
using testing::Oracle;
using testing::OracleRun;
using testing::robin_of;
using testing::run_of;
using testing::run_ranks;
using testing::Trained;

constexpr auto modes = {WeightMode::stashing, WeightMode::vertical, WeightMode::two_buffers, WeightMode::flush};

// The stage with most replicas is updated so often.
std::int64_t minibatches_for(const OracleRun& run, int updates) {
  const auto robin = robin_of(run);
  if (robin.round() == 1) return updates;
  const int most = *std::max_element(run.replicas.begin(), run.replicas.end());
  return (std::int64_t{updates} * most + robin.round() - 1) / robin.round() * robin.round();
}

void expect_equations(const OracleRun& run, int updates = 50) {
  SCOPED_TRACE(fmt::format("{} on {}, minibatches of {}", run.mode, fmt::join(run.replicas, "-"), run.microbatches));
  const auto count = minibatches_for(run, updates);
  Oracle oracle(run);
  oracle.train(count);
  const int ranks = std::accumulate(run.replicas.begin(), run.replicas.end(), 0);
  std::vector<double> losses(static_cast<std::size_t>(count));
  std::vector<std::vector<int>> staleness(run.replicas.size());
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    Trained trained(world, run);
    trained.train(run, count);
    trained.pipeline->drain();
    expect_weights(*trained.pipeline, oracle);
    const std::lock_guard lock(mutex);
    auto& stalest = staleness[static_cast<std::size_t>(trained.pipeline->stage())];
    stalest.resize(trained.updates.size());
    for (std::size_t at = 0; at < stalest.size(); ++at) stalest[at] = std::max(stalest[at], trained.updates[at].staleness);
    for (std::int64_t at = 0; at < count; ++at) losses[static_cast<std::size_t>(at)] += trained.pipeline->take_loss(at);
  });
  for (std::size_t at = 0; at < losses.size(); ++at)
    EXPECT_NEAR(losses[at], oracle.losses()[at], 1e-12 * oracle.losses()[at]) << "minibatch " << at;
  for (std::size_t stage = 0; stage < staleness.size(); ++stage)
    EXPECT_EQ(staleness[stage], oracle.staleness(static_cast<int>(stage))) << "stage " << stage;
}

const std::vector<std::vector<int>> layouts = {{1}, {3}, {1, 1}, {2, 1}, {3, 1}, {2, 3}, {1, 2, 1}, {1, 1, 1}, {1, 1, 1, 1}};

TEST(PipeDream, FollowsItsEquationsWithMomentum) {
  for (const auto mode : modes)
    for (const auto& replicas : layouts) expect_equations(run_of(replicas, mode));
}

// What is tested above can tell the modes from each other.
TEST(PipeDream, EquationsDiffer) {
  std::vector<std::map<std::string, at::Tensor>> weights;
  for (const auto mode : modes) {
    Oracle oracle(run_of({1, 1, 1}, mode, 4));
    oracle.train(10);
    weights.push_back(oracle.weights());
    for (std::size_t other = 0; other + 1 < weights.size(); ++other)
      EXPECT_GT((weights.back().at("floor0.weight") - weights[other].at("floor0.weight")).norm().item<double>(), 1e-4);
  }
}

// Runs that end before the pipeline is full, or soon after, and runs that drain on the way.
TEST(PipeDream, DrainsAnywhere) {
  for (const auto mode : modes)
    for (const auto& replicas : {std::vector{1, 1, 1, 1}, {2, 1}, {1, 2, 1}, {2, 3}}) {
      const auto run = run_of(replicas, mode);
      SCOPED_TRACE(fmt::format("{} on {}", run.mode, fmt::join(replicas, "-")));
      const int round = robin_of(run).round();
      const int ranks = std::accumulate(replicas.begin(), replicas.end(), 0);
      Oracle oracle(run);
      for (const int rounds : {1, 2, 1, 3, 7, 4, 20}) {
        oracle.train(rounds * round);
        oracle.drain();
      }
      run_ranks(ranks, [&](World& world) {
        Trained trained(world, run);
        for (const int rounds : {1, 2, 1, 3, 7, 4, 20}) {
          trained.train(run, rounds * round);
          trained.pipeline->drain();
          EXPECT_TRUE(trained.pipeline->empty());
        }
        EXPECT_EQ(trained.pipeline->drains(), 7);
        trained.pipeline->drain();
        EXPECT_EQ(trained.pipeline->drains(), 7);
        expect_weights(*trained.pipeline, oracle);
        // Forwards alone, with the newest weights.
        std::vector<Microbatch> held_out;
        for (int at = 0; at < 5; ++at) held_out.push_back(testing::tower_minibatch(900 + at, 1)[0]);
        EXPECT_NEAR(trained.pipeline->evaluate(held_out), oracle.loss_of(held_out), 1e-12);
        // What is loaded in between are the newest weights.
        for (const auto& slice : trained.pipeline->slices()) slice.write(0, slice.read());
        trained.pipeline->slices_written();
        trained.train(run, round);
        EXPECT_NE(testing::thrown<Error>([&] { trained.pipeline->evaluate(held_out); }).find("drain() first"),
                  std::string::npos);
        trained.pipeline->drain();
      });
    }
}

// A minibatch of several microbatches with one version.
TEST(PipeDream, AccumulatesInsideAMinibatch) {
  for (const auto mode : {WeightMode::stashing, WeightMode::vertical})
    for (const auto& replicas : {std::vector{1, 1, 1}, {3, 1}, {2, 3}}) expect_equations(run_of(replicas, mode, 3), 10);
}

// A minibatch that weighs nothing has gradients and a loss of 0.
TEST(PipeDream, WeighsMicrobatchesAsTheySay) {
  for (const auto mode : modes)
    for (const auto& replicas : {std::vector{1, 1, 1}, {2, 1}, {1, 2}}) {
      const bool in_turn = mode == WeightMode::stashing || mode == WeightMode::vertical;
      auto run = run_of(replicas, mode, in_turn ? 2 : 0);
      run.weighed = true;
      expect_equations(run, 12);
      if (!in_turn) continue;
      run.microbatches = 1;
      expect_equations(run, 12);
    }
}

TEST(PipeDream, ClipsTheGradientOfEachStage) {
  for (const auto mode : modes) {
    auto run = run_of({2, 1}, mode);
    run.clip = 0.01;
    expect_equations(run, 12);
  }
}

// As many versions and activations as the page says.
TEST(PipeDream, KeepsWhatItNeedsAndNoMore) {
  for (const auto mode : modes)
    for (const auto& replicas : {std::vector{1, 1, 1, 1}, {3, 1}, {1, 2, 1}, {2, 3}, {3}}) {
      const auto run = run_of(replicas, mode);
      SCOPED_TRACE(fmt::format("{} on {}", run.mode, fmt::join(replicas, "-")));
      const int ranks = std::accumulate(replicas.begin(), replicas.end(), 0);
      run_ranks(ranks, [&](World& world) {
        Trained trained(world, run);
        const int round = robin_of(run).round();
        trained.train(run, 12 * round);
        trained.pipeline->drain();
        const int stage = trained.pipeline->stage();
        int here = 0;
        for (std::size_t at = static_cast<std::size_t>(stage); at < replicas.size(); ++at) here += replicas[at];
        const int own = replicas[static_cast<std::size_t>(stage)], depth = (here + own - 1) / own;
        EXPECT_EQ(trained.pipeline->peak_activations(), depth);
        // As the page derives it for vertical synchronisation.
        const int first = replicas.front(), admitted = (ranks + first - 1) / first;
        const int vertical = 1 + (admitted * first - std::gcd(first, own) + own - 1) / own;
        const int most = mode == WeightMode::stashing      ? depth
                         : mode == WeightMode::two_buffers ? 2
                         : mode == WeightMode::flush       ? 1
                                                           : vertical;
        EXPECT_EQ(trained.pipeline->versions(), most);
        // There is no generation of that number, so all that are there have come since.
        for (const auto& flat : trained.pipeline->engine().flats()) EXPECT_EQ(flat->behind(-1), most);
      });
    }
}

// What a rank is handed piece by piece is its row of the whole table, however long that is, and no more of it is at hand
// than at the beginning.
TEST(PipeDream, ARowIsHandedOutPieceByPiece) {
  using schedule::Action;
  const auto is_receive = [](const Action& action) { return schedule::is_receive(action.kind); };
  for (const auto mode : modes)
    for (const auto& replicas : {std::vector{1}, {3}, {1, 1, 1, 1}, {3, 1}, {2, 3}, {1, 2, 1}})
      for (const int rounds : {1, 2, 5, 12, 150}) {
        auto robin = robin_of(run_of(replicas, mode));
        robin.minibatches = rounds * robin.round();
        SCOPED_TRACE(fmt::format("{} on {}, {} minibatches", name_of(mode), fmt::join(replicas, "-"), robin.minibatches));
        const auto table = schedule::lower(schedule::pipedream(robin), {.receive_ahead = 1, .reductions = true});
        for (int rank = 0; rank < robin.ranks(); ++rank) {
          PipeDreamRow row(robin, rank, 1);
          std::vector<Action> handed;
          std::size_t most = 0, most_early = 0;
          const auto take = [&](const std::vector<Executor::Cell>& cells) {
            for (const auto& cell : cells) handed.push_back(cell.action);
          };
          for (int minibatch = 1; minibatch <= robin.minibatches; ++minibatch) {
            take(row.admit(minibatch));
            most = std::max(most, row.cells_at_hand());
            if (minibatch <= 60 * robin.round()) most_early = most;
          }
          take(row.drain(robin.minibatches));
          EXPECT_EQ(most, most_early);
          // Receives may come later than in the whole table, where their minibatch was not admitted; never behind what reads
          // them.
          auto expected = table.rows[static_cast<std::size_t>(rank)];
          std::vector<Action> received, wanted;
          std::copy_if(handed.begin(), handed.end(), std::back_inserter(received), is_receive);
          std::copy_if(expected.begin(), expected.end(), std::back_inserter(wanted), is_receive);
          for (const auto& receive : received) {
            const auto reader =
                receive.kind == schedule::Kind::receive_forward ? schedule::Kind::forward : schedule::Kind::backward;
            const auto at = std::find(handed.begin(), handed.end(), receive);
            EXPECT_NE(std::find(at, handed.end(), Action{receive.stage, reader, receive.microbatch}), handed.end())
                << schedule::to_text(receive);
          }
          const auto by_number = [](const Action& a, const Action& b) {
            return std::tuple(a.kind, a.microbatch) < std::tuple(b.kind, b.microbatch);
          };
          std::sort(received.begin(), received.end(), by_number);
          std::sort(wanted.begin(), wanted.end(), by_number);
          EXPECT_EQ(received, wanted);
          std::erase_if(handed, is_receive);
          std::erase_if(expected, is_receive);
          EXPECT_EQ(handed, expected) << "rank " << rank;
        }
      }
}

// Without stashing a backward has other weights than its forward: what comes out is no mode's.
TEST(PipeDream, WithoutStashingGradientsAreOthers) {
  auto run = run_of({1, 1, 1}, WeightMode::stashing);
  Oracle oracle(run);
  oracle.train(20);
  run.stash = false;
  run_ranks(3, [&](World& world) {
    Trained trained(world, run);
    trained.train(run, 20);
    trained.pipeline->drain();
    EXPECT_EQ(trained.updates.back().staleness, 2 - world.rank());
    EXPECT_EQ(trained.pipeline->versions(), std::min(2, 3 - world.rank()));
    const auto expected = oracle.weights();
    const auto whole = trained.pipeline->engine().full_parameters();
    for (const auto& item : trained.pipeline->module().named_parameters())
      EXPECT_GT((item.value() - expected.at(item.key())).norm().item<double>(), 1e-6) << item.key();
  });
}

TEST(PipeDream, WhatCannotBeIsRefused) {
  run_ranks(2, [&](World& world) {
    const auto message = [&](PipeDreamOptions options, Chain chain) {
      options.example = testing::tower_minibatch(0, 1)[0];
      return testing::thrown<ConfigError>(
          [&] { PipeDream(world.mesh({.pipeline = 2}), std::move(chain), std::move(options)); });
    };
    const auto of = [](std::vector<int> replicas) { return PipeDreamOptions{.robin = {.replicas = std::move(replicas)}}; };
    const auto tower = testing::tower(3);
    testing::expect_part(message(of({2, 1}), tower), "replicas 2,1 are 3 ranks; the mesh has 2 along the pipeline");
    auto options = of({1, 1});
    options.shard.what = Sharded::parameters;
    testing::expect_part(message(options, tower), "replicas hold whole stages");
    options = of({1, 1});
    options.stash = false;
    options.robin.mode = WeightMode::vertical;
    testing::expect_part(message(options, tower), "there are no versions to hold; allowed: pipedream");
    auto tied = tower;
    tied.tied = {{{{0, "floor0.weight"}, {2, "floor2.weight"}}}};
    testing::expect_part(message(of({1, 1}), tied), "is tied over stages 0, 1");
    testing::expect_part(message(of({1, 1}), testing::tower(1)), "2 stages for a model of 1 Units");
  });
  run_ranks(3, [&](World& world) {
    Trained trained(world, run_of({2, 1}, WeightMode::stashing));
    trained.train(run_of({2, 1}, WeightMode::stashing), 1);
    EXPECT_FALSE(trained.pipeline->can_drain());
    testing::expect_part(testing::thrown<Error>([&] { trained.pipeline->drain(); }), "a multiple of 2");
    trained.train(run_of({2, 1}, WeightMode::stashing), 1);
    trained.pipeline->drain();
  });
}

TEST(PipeDream, FollowsItsEquationsWithAdam) {
  for (const auto mode : modes)
    for (const auto& replicas : {std::vector{2, 1}, {1, 1, 1}}) {
      auto run = run_of(replicas, mode);
      run.adam = true;
      run.lr = 0.01;
      expect_equations(run);
    }
}

}  // namespace
}  // namespace bonfire::pipedream_test
