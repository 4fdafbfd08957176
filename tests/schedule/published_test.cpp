#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "bonfire/schedule/clock.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/timeline.h"

// Bubble rates that were published, against the clock: tests/schedule/zero_bubble_2401.10241.csv says where they are from.
namespace bonfire::schedule::published_test {
namespace {

struct Row {
  std::string model;
  int ranks = 0, microbatches = 0, chunks = 0;
  double forward = 0, input_gradient = 0, weight_gradient = 0, message = 0;
  double rate_1f1b = 0, rate_interleaved = 0, rate_h1 = 0, rate_h2 = 0, rate_1p = 0;

  double work() const { return microbatches * (forward + input_gradient + weight_gradient); }
  StageCosts costs(int parts = 1) const {
    return {.forward = forward / parts,
            .backward = (input_gradient + weight_gradient) / parts,
            .input_gradient = input_gradient / parts,
            .weight_gradient = weight_gradient / parts};
  }
  std::string name() const { return model + " with " + std::to_string(microbatches) + " microbatches"; }
};

std::vector<Row> published() {
  std::ifstream in(BONFIRE_SOURCE_DIR "/tests/schedule/zero_bubble_2401.10241.csv");
  std::vector<Row> rows;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#' || line.starts_with("model")) continue;
    std::replace(line.begin(), line.end(), ',', ' ');
    Row row;
    std::istringstream cells(line);
    cells >> row.model >> row.ranks >> row.microbatches >> row.chunks >> row.forward >> row.input_gradient >>
        row.weight_gradient >> row.message >> row.rate_1f1b >> row.rate_interleaved >> row.rate_h1 >> row.rate_h2 >>
        row.rate_1p;
    EXPECT_TRUE(cells) << line;
    rows.push_back(row);
  }
  return rows;
}

// As the table prints it.
double digits(double rate) { return std::round(rate * 1e4) / 1e4; }

// The paper's rate: of the rank that is occupied longest, the part that is no work.
double rate(const Row& row, const Schedule& schedule) {
  const Timeline timeline = simulate(schedule, Costs(row.costs(), row.message));
  double cost = 0;
  for (int rank = 0; rank < row.ranks; ++rank) cost = std::max(cost, timeline.occupied(rank));
  return digits((cost - row.work()) / cost);
}

TEST(Published, ZeroBubbleRates) {
  const auto rows = published();
  ASSERT_EQ(rows.size(), 12);
  for (const Row& row : rows) {
    const Shape shape{.ranks = row.ranks, .microbatches = row.microbatches};
    EXPECT_EQ(rate(row, one_f_one_b(shape)), row.rate_1f1b) << row.name();
    EXPECT_EQ(rate(row, zb_h1(shape)), row.rate_h1) << row.name();
    EXPECT_EQ(rate(row, zb_h2(shape)), row.rate_h2) << row.name();
    EXPECT_EQ(row.rate_1p, row.rate_h1) << row.name();  // the search found nothing better than H1
  }
}

// For the interleaved schedule the paper's calculation waits for messages from the last rank back to the first only at the
// first microbatch of each turn. Here the same table is put on the clock with just those waits.
double interleaved_cost_as_published(const Row& row, const Schedule& schedule) {
  Clock clock;
  const int p = row.ranks, stages = schedule.stages;
  const auto at = [&](int stage, int microbatch) { return static_cast<std::size_t>(stage * row.microbatches + microbatch); };
  std::vector<Task> forward(at(stages, 0)), backward(at(stages, 0));
  const StageCosts costs = row.costs(row.chunks);
  for (const auto& cells : schedule.rows) {
    const Resource rank = clock.resource("rank");
    for (const Action& cell : cells) {
      if (cell.kind == Kind::update) continue;
      const bool is_forward = cell.kind == Kind::forward;
      (is_forward ? forward : backward)[at(cell.stage, cell.microbatch)] =
          clock.task(rank, is_forward ? costs.forward : costs.backward);
    }
  }
  for (int from = 0; from + 1 < stages; ++from) {
    const Resource down = clock.resource("down"), up = clock.resource("up");
    for (int i = 0; i < row.microbatches; ++i) {
      if ((from + 1) % p == 0 && i % p != 0) continue;
      clock.wait(forward[at(from + 1, i)], clock.task(down, row.message, {forward[at(from, i)]}));
      clock.wait(backward[at(from, i)], clock.task(up, row.message, {backward[at(from + 1, i)]}));
    }
  }
  clock.run();
  return clock.makespan();
}

TEST(Published, InterleavedRates) {
  for (const Row& row : published()) {
    const Schedule schedule = interleaved({row.ranks, row.microbatches, row.chunks});
    const double as_published = interleaved_cost_as_published(row, schedule);
    EXPECT_EQ(digits((as_published - row.work()) / as_published), row.rate_interleaved) << row.name();
    // Waiting for all messages costs p of them more: the first input goes down through all stages and its gradient up again.
    const double cost = simulate(schedule, Costs(row.costs(row.chunks), row.message)).makespan;
    EXPECT_NEAR(cost, as_published + row.ranks * row.message, 1e-9 * cost) << row.name();
    const double bubble = (row.ranks - 1) * (row.work() / row.microbatches) / row.chunks;
    EXPECT_NEAR(cost, row.work() + bubble + 2 * (schedule.stages - 1) * row.message, 1e-9 * cost) << row.name();
  }
}

}  // namespace
}  // namespace bonfire::schedule::published_test
