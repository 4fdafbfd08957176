#include "bonfire/schedule/pipedream.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"

namespace bonfire::schedule {
namespace {

constexpr std::array<std::string_view, 4> kPipeDreamNames = {"pipedream", "pipedream-vertical", "pipedream-2bw",
                                                             "pipedream-flush"};
constexpr std::int64_t kMostPipeDreamCells = std::int64_t{1} << 26;

// Whether each minibatch stays on one replica, and is updated with as soon as its round has come back.
bool by_minibatch(const RoundRobin& robin) {
  return robin.mode == WeightMode::stashing || robin.mode == WeightMode::vertical;
}

std::size_t slot(int index) { return static_cast<std::size_t>(index); }

void require_positive(const RoundRobin& robin, const char* what, int value) {
  if (value < 1) fail_config("schedule {}: {} {}; allowed: 1 or more", name_of(robin.mode), value, what);
}

// Their least common multiple.
std::int64_t require_replicas(const RoundRobin& robin) {
  const auto name = name_of(robin.mode);
  if (robin.replicas.empty()) fail_config("schedule {}: no stages; allowed: the replicas of each stage, such as 3,1", name);
  std::int64_t round = 1;
  for (const int replicas : robin.replicas) {
    require_positive(robin, "replicas", replicas);
    round = std::lcm(round, static_cast<std::int64_t>(replicas));
    if (round > 1 << 20)
      fail_config("schedule {}: replicas {} come together only after {} minibatches; allowed: up to {}", name,
                  fmt::join(robin.replicas, ","), round, 1 << 20);
  }
  return round;
}

void require_possible(const RoundRobin& robin) {
  const auto name = name_of(robin.mode);
  const std::int64_t round = require_replicas(robin);
  require_positive(robin, "minibatches", robin.minibatches);
  require_positive(robin, "microbatches", robin.microbatches);
  const std::int64_t stages = static_cast<std::int64_t>(robin.replicas.size());
  if (stages * robin.minibatches > kMostPipeDreamCells / robin.microbatches)
    fail_config("schedule {}: {} stages x {} minibatches x {} microbatches; allowed: at most {} in all", name, stages,
                robin.minibatches, robin.microbatches, kMostPipeDreamCells);
  if (by_minibatch(robin)) {
    if (robin.minibatches % round != 0)
      fail_config("schedule {}: {} minibatches for replicas {}; allowed: whole rounds of all stages, a multiple of {}", name,
                  robin.minibatches, fmt::join(robin.replicas, ","), round);
    return;
  }
  if (robin.microbatches % round != 0)
    fail_config("schedule {}: a minibatch of {} microbatches for replicas {}; allowed: a multiple of {}", name,
                robin.microbatches, fmt::join(robin.replicas, ","), round);
}

// The microbatches of one replica, in order.
std::vector<std::int32_t> own_microbatches(const RoundRobin& robin, int stage, int replica) {
  const int replicas = robin.replicas[slot(stage)];
  const int turn = by_minibatch(robin) ? robin.microbatches : 1, total = robin.minibatches * robin.microbatches;
  std::vector<std::int32_t> own;
  for (int begin = replica * turn; begin < total; begin += replicas * turn)
    for (int i = begin; i < begin + turn; ++i) own.push_back(i);
  return own;
}

// One forward, one backward, over `own`, with so many forwards ahead; an update after every `per_update` backwards.
struct Pace {
  std::int32_t stage;
  int ahead;
  int per_update;
};

void append_pace(std::vector<Action>& row, const Pace& pace, const std::vector<std::int32_t>& own) {
  const int count = static_cast<int>(own.size()), ahead = std::min(pace.ahead, count);
  for (int i = 0; i < ahead; ++i) row.push_back({pace.stage, Kind::forward, own[slot(i)]});
  for (int i = 0; i < count; ++i) {
    row.push_back({pace.stage, Kind::backward, own[slot(i)]});
    if ((i + 1) % pace.per_update == 0) row.push_back({pace.stage, Kind::update});
    if (ahead + i < count) row.push_back({pace.stage, Kind::forward, own[slot(ahead + i)]});
  }
}

std::vector<std::vector<int>> updates_before(const Schedule& table) {
  std::vector<std::vector<int>> result;
  for (const auto& row : table.rows) {
    auto& counts = result.emplace_back();
    int count = 0;
    for (const Action& action : row) {
      counts.push_back(count);
      if (action.kind == Kind::update) ++count;
    }
  }
  return result;
}

}  // namespace

std::string_view name_of(WeightMode mode) { return kPipeDreamNames[static_cast<std::size_t>(mode)]; }

std::optional<WeightMode> weight_mode(std::string_view schedule) {
  const auto found = std::find(kPipeDreamNames.begin(), kPipeDreamNames.end(), schedule);
  if (found == kPipeDreamNames.end()) return std::nullopt;
  return static_cast<WeightMode>(found - kPipeDreamNames.begin());
}

const std::vector<std::string>& pipedream_names() {
  static const std::vector<std::string> names(kPipeDreamNames.begin(), kPipeDreamNames.end());
  return names;
}

int RoundRobin::ranks() const { return std::accumulate(replicas.begin(), replicas.end(), 0); }

int RoundRobin::first_rank(int stage) const { return std::accumulate(replicas.begin(), replicas.begin() + stage, 0); }

int RoundRobin::rank_of(int stage, int microbatch) const {
  const int turn = by_minibatch(*this) ? microbatches : 1;
  return first_rank(stage) + microbatch / turn % replicas[slot(stage)];
}

int RoundRobin::round() const {
  if (!by_minibatch(*this)) return 1;
  return std::accumulate(replicas.begin(), replicas.end(), 1, [](int a, int b) { return std::lcm(a, b); });
}

int in_flight(const RoundRobin& robin, int stage) {
  const int replicas = robin.replicas[slot(stage)];
  const int from_here = std::accumulate(robin.replicas.begin() + stage, robin.replicas.end(), 0);
  return (from_here + replicas - 1) / replicas;
}

Schedule pipedream(const RoundRobin& robin) {
  require_possible(robin);
  const int stages = static_cast<int>(robin.replicas.size());
  Schedule table{stages, robin.minibatches * robin.microbatches, {}};
  for (int stage = 0; stage < stages; ++stage)
    for (int replica = 0; replica < robin.replicas[slot(stage)]; ++replica) {
      auto& row = table.rows.emplace_back();
      const auto own = own_microbatches(robin, stage, replica);
      const int full = in_flight(robin, stage);
      if (by_minibatch(robin)) {
        // One microbatch less than that many minibatches: so all microbatches of one see the same updates.
        append_pace(row, {stage, robin.microbatches * (full - 1) + 1, robin.microbatches}, own);
        continue;
      }
      const int each = robin.microbatches / robin.replicas[slot(stage)];
      if (robin.mode == WeightMode::two_buffers) {
        append_pace(row, {stage, full, each}, own);
        continue;
      }
      for (int minibatch = 0; minibatch < robin.minibatches; ++minibatch)
        append_pace(row, {stage, full, each}, {own.begin() + minibatch * each, own.begin() + (minibatch + 1) * each});
    }
  return table;
}

Versions versions_of(const Schedule& table, WeightMode mode, const std::string& name) {
  const auto updates = updates_before(table);
  const Index index(table);
  std::vector<int> replicas(slot(table.stages));
  for (const auto& row : table.rows) ++replicas[slot(row.front().stage)];

  // Of a microbatch on one stage. `forward` and `backward` are where they are in the table.
  const auto version = [&](Position forward, Position backward) {
    const Action& action = table.at(forward);
    const int newest = updates[slot(forward.rank)][slot(forward.at)];
    const int own_update = updates[slot(backward.rank)][slot(backward.at)];
    switch (mode) {
      case WeightMode::stashing: return newest;
      case WeightMode::vertical: {
        // Updates of the first stage stand for minibatches, and those for updates here.
        const Position first = index.find(Kind::forward, 0, action.microbatch);
        return updates[slot(first.rank)][slot(first.at)] * replicas[0] / replicas[slot(action.stage)];
      }
      case WeightMode::two_buffers: return std::max(0, own_update - 1);
      case WeightMode::flush: return own_update;
    }
    return newest;
  };

  Versions result;
  for (std::int32_t rank = 0; rank < table.ranks(); ++rank) {
    const auto& row = table.rows[slot(rank)];
    auto& of = result.of.emplace_back(row.size(), -1);
    for (std::int32_t cell = 0; cell < static_cast<std::int32_t>(row.size()); ++cell) {
      const Action& action = row[slot(cell)];
      const int newest = updates[slot(rank)][slot(cell)];
      if (action.kind == Kind::update) of[slot(cell)] = newest + 1;
      if (action.kind != Kind::forward) continue;
      const Position forward{rank, cell}, backward = index.find(Kind::backward, action.stage, action.microbatch);
      const int needed = version(forward, backward);
      if (needed > newest)
        throw ScheduleError(
            fmt::format(
                "schedule {}: rank {}, cell {}, '{}': it needs version {} of its weights, and {} updates came before; "
                "allowed: more microbatches in a minibatch",
                name, rank, cell, to_text(action), needed, newest),
            marked_table(table, forward));
      of[slot(cell)] = of[slot(backward.at)] = needed;
    }
    // From the oldest that is still to be used to the newest.
    int held = 1, oldest = updates[slot(rank)].empty() ? 0 : updates[slot(rank)].back() + 1;
    for (std::size_t cell = row.size(); cell-- > 0;) {
      const int newest = updates[slot(rank)][cell] + (row[cell].kind == Kind::update ? 1 : 0);
      oldest = std::min(oldest, newest);
      held = std::max(held, newest - oldest + 1);
      if (row[cell].kind == Kind::forward || row[cell].kind == Kind::backward) {
        oldest = std::min(oldest, of[cell]);
        held = std::max(held, newest - oldest + 1);
      }
    }
    result.held.push_back(held);
  }
  return result;
}

int update_of(const RoundRobin& robin, int stage, int microbatch) {
  const int minibatch = microbatch / robin.microbatches;
  return by_minibatch(robin) ? minibatch / robin.replicas[slot(stage)] : minibatch;
}

int version_of(const RoundRobin& robin, int stage, int microbatch) {
  const auto newest = [&](int at) { return std::max(0, update_of(robin, at, microbatch) - in_flight(robin, at) + 1); };
  switch (robin.mode) {
    case WeightMode::stashing: return newest(stage);
    case WeightMode::vertical: return newest(0) * robin.replicas[0] / robin.replicas[slot(stage)];
    case WeightMode::two_buffers: return std::max(0, update_of(robin, stage, microbatch) - 1);
    case WeightMode::flush: break;
  }
  return update_of(robin, stage, microbatch);
}

std::vector<std::vector<int>> staleness_of(const Schedule& table, const Versions& versions) {
  std::vector<std::vector<int>> result;
  for (std::size_t rank = 0; rank < table.rows.size(); ++rank) {
    auto& row = result.emplace_back();
    int most = 0, updates = 0;
    for (std::size_t cell = 0; cell < table.rows[rank].size(); ++cell) {
      const Kind kind = table.rows[rank][cell].kind;
      if (kind == Kind::backward) most = std::max(most, updates - versions.of[rank][cell]);
      if (kind != Kind::update) continue;
      row.push_back(std::exchange(most, 0));
      ++updates;
    }
  }
  return result;
}

namespace {

// The least number of minibatches with which the pipeline is full, in whole rounds.
int filling(const RoundRobin& robin) {
  int most = 1;
  for (int stage = 0; stage < static_cast<int>(robin.replicas.size()); ++stage) {
    const int full = in_flight(robin, stage) * robin.replicas[slot(stage)];  // minibatches, or microbatches
    most = std::max(most, by_minibatch(robin) ? full : (full + robin.microbatches - 1) / robin.microbatches);
  }
  const int round = robin.round();
  return (most + round - 1) / round * round;
}

}  // namespace

RoundRobin endless_shape(RoundRobin robin) {
  require_replicas(robin);
  robin.microbatches = 1;
  if (!by_minibatch(robin)) {
    const int round =
        std::accumulate(robin.replicas.begin(), robin.replicas.end(), 1, [](int a, int b) { return std::lcm(a, b); });
    // So many that a replica has had all of a minibatch back before those of the next but one come.
    int least = 1;
    for (int stage = 0; stage < static_cast<int>(robin.replicas.size()); ++stage)
      least = std::max(least, in_flight(robin, stage) * robin.replicas[slot(stage)]);
    robin.microbatches = (least + round - 1) / round * round;
  }
  robin.minibatches = filling(robin) + robin.round();
  return robin;
}

int vertical_versions(const VerticalStage& stage) {
  const auto& [ranks, first, own] = stage;
  const int admitted = (ranks + first - 1) / first * first;  // minibatches on all replicas of the first stage
  return 1 + (admitted - std::gcd(first, own) + own - 1) / own;
}

int most_versions(const RoundRobin& robin, int stage) {
  switch (robin.mode) {
    case WeightMode::stashing: return in_flight(robin, stage);
    case WeightMode::two_buffers: return 2;
    case WeightMode::flush: return 1;
    case WeightMode::vertical: break;
  }
  return vertical_versions({.ranks = robin.ranks(), .first = robin.replicas[0], .own = robin.replicas[slot(stage)]});
}

Endless endless(RoundRobin robin, const LowerOptions& options) {
  require_replicas(robin);
  const int round = robin.round();
  // A period in the middle, so that lowering sees the same on both sides of it wherever it comes.
  robin.minibatches = 2 * filling(robin) + 2 * round;
  const Schedule shorter = lower(pipedream(robin), options);
  const int before = robin.minibatches - round;
  robin.minibatches += round;
  const Schedule table = lower(pipedream(robin), options);
  const int per_period = round * robin.microbatches;

  Endless result{.microbatches = per_period, .least_minibatches = robin.minibatches, .period_minibatches = round};
  for (Schedule* part : {&result.prologue, &result.period, &result.epilogue}) {
    part->stages = table.stages;
    part->microbatches = table.microbatches;
  }
  for (std::size_t rank = 0; rank < table.rows.size(); ++rank) {
    const auto& row = table.rows[rank];
    const std::size_t length = row.size() - shorter.rows[rank].size();
    // The period begins at a backward of the round before the middle.
    const std::int32_t first = (before / 2 / round) * per_period;
    const auto begins = std::find_if(row.begin(), row.end(), [&](const Action& action) {
      return action.kind == Kind::backward && action.microbatch >= first;
    });
    const auto ends = begins + static_cast<std::ptrdiff_t>(length);
    result.prologue.rows.emplace_back(row.begin(), begins);
    result.period.rows.emplace_back(begins, ends);
    result.epilogue.rows.emplace_back(ends, row.end());
  }
  return result;
}

std::vector<Action> unrolled_row(const Endless& table, int rank, Periods periods) {
  std::vector<Action> row;
  if (periods.skipped == 0) row = table.prologue.rows[slot(rank)];
  const auto append_shifted = [&](const Schedule& part, int shift) {
    for (Action action : part.rows[slot(rank)]) {
      if (has_microbatch(action.kind) && action.kind != Kind::tie) action.microbatch += shift;
      row.push_back(action);
    }
  };
  for (int period = periods.skipped; period < periods.count; ++period)
    append_shifted(table.period, period * table.microbatches);
  append_shifted(table.epilogue, (periods.count - 1) * table.microbatches);
  return row;
}

Schedule unrolled(const Endless& table, int periods) {
  Schedule result{table.prologue.stages, table.prologue.microbatches + (periods - 1) * table.microbatches, {}};
  for (int rank = 0; rank < table.prologue.ranks(); ++rank)
    result.rows.push_back(unrolled_row(table, rank, {.count = periods}));
  return result;
}

}  // namespace bonfire::schedule
