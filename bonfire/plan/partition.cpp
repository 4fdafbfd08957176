#include "bonfire/plan/partition.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "bonfire/base/error.h"

namespace bonfire::plan {

using schedule::WeightMode;

namespace {

constexpr double kNoTime = std::numeric_limits<double>::infinity();

// Ranks behind a component that hold later stages, for each replica of the component: a fraction.
struct Behind {
  std::int64_t ranks = 0, replicas = 1;

  Behind plus(std::int64_t more) const { return {ranks + more * replicas, replicas}; }
  Behind over(std::int64_t copies) const {
    const std::int64_t all = replicas * copies, common = std::gcd(ranks, all);
    return {ranks / common, all / common};
  }
  std::int64_t rounded_up() const { return (ranks + replicas - 1) / replicas; }
  auto operator<=>(const Behind&) const = default;
};

StageMemory memory_of_part(const Cut& before, const Cut& until, int in_flight, int versions) {
  const auto part = [&](std::int64_t Cut::*member) { return until.*member - before.*member; };
  const std::int64_t weights = part(&Cut::parameter_bytes);
  // Where an update leaves older versions as they are, the masters that it changes lie apart.
  return {.weights = weights * (versions + (versions > 1 ? 1 : 0)),
          .state = part(&Cut::state_bytes),
          .activations = part(&Cut::saved_bytes) * in_flight};
}

class PartitionSearch {
 public:
  PartitionSearch(const Cuts& cuts, const Topology& topology, WeightMode mode)
      : cuts_(cuts), topology_(topology), mode_(mode) {
    for (const auto& level : topology.levels) size_.push_back(size_.back() * level.count);
  }

  Partition best() {
    const int top = static_cast<int>(topology_.levels.size());
    const Table& table = solve(top, {});
    const int last = cuts_.count() - 1;
    Partition found{.seconds = table.end(-1, last, count(top)).seconds, .considered = considered_};
    if (found.seconds < kNoTime) expand(top, {}, {-1, last, 1}, found.stages);
    return found;
  }

 private:
  struct Choice {
    double seconds = kNoTime;
    std::int32_t before = -2;  // the cut before its last stage; -2: there is none
    std::int32_t replicas = 0;
  };

  // The best ways to run what lies between two cuts on so many components of one level. It may end there (`end`), or
  // hand on what crosses the cut to others of that level (`pass`).
  class Table {
   public:
    Table(int cuts, int count, bool from_start)
        : cuts_(cuts),
          count_(count),
          ends_(static_cast<std::size_t>(from_start ? 1 : cuts + 1) * static_cast<std::size_t>(cuts) *
                static_cast<std::size_t>(count)),
          passes_(ends_.size()) {}
    Choice& end(int from, int to, int on) { return ends_[slot(from, to, on)]; }
    Choice& pass(int from, int to, int on) { return passes_[slot(from, to, on)]; }
    const Choice& end(int from, int to, int on) const { return ends_[slot(from, to, on)]; }
    const Choice& pass(int from, int to, int on) const { return passes_[slot(from, to, on)]; }

   private:
    std::size_t slot(int from, int to, int on) const {
      return (static_cast<std::size_t>(from + 1) * static_cast<std::size_t>(cuts_) + static_cast<std::size_t>(to)) *
                 static_cast<std::size_t>(count_) +
             static_cast<std::size_t>(on - 1);
    }
    int cuts_, count_;
    std::vector<Choice> ends_, passes_;
  };

  struct Piece {
    int from, to;
    int copies;  // of the component that runs it
  };

  int count(int level) const { return topology_.levels[static_cast<std::size_t>(level - 1)].count; }
  double bandwidth(int level) const { return topology_.levels[static_cast<std::size_t>(level - 1)].bandwidth; }
  std::int64_t ranks_below(int level) const { return size_[static_cast<std::size_t>(level - 1)]; }
  const Cut& cut(int at) const { return at < 0 ? nothing_ : cuts_[at]; }

  // What lies behind each of `replicas` components that run a stage, where the stages up to it are on `used` components.
  Behind behind(int level, Behind after, int used, int replicas) const {
    if (!topology_.memory) return {};
    return after.plus((count(level) - used) * ranks_below(level)).over(replicas);
  }

  // One rank.
  double alone(int from, int to, Behind after) const {
    if (topology_.memory) {
      const int in_flight = static_cast<int>(1 + after.rounded_up());
      if (memory_of_part(cut(from), cut(to), in_flight, versions_held(in_flight, after)).total() > *topology_.memory)
        return kNoTime;
    }
    return cut(to).seconds - cut(from).seconds;
  }

  // An upper bound for vertical synchronisation, where it depends on stages that are not chosen yet: all ranks, and as many
  // again, may have admitted minibatches.
  int versions_held(int in_flight, Behind after) const {
    switch (mode_) {
      case WeightMode::stashing: return in_flight;
      case WeightMode::vertical: {
        const auto ranks = topology_.ranks();
        const double replicas =
            std::max(1.0, ranks / (1.0 + static_cast<double>(after.ranks) / static_cast<double>(after.replicas)));
        return static_cast<int>(2 * ranks / replicas) + 1;
      }
      case WeightMode::two_buffers: return 2;
      case WeightMode::flush: return 1;
    }
    return 1;
  }

  const Table& solve(int level, Behind after) {
    const auto known = tables_.find({level, after});
    if (known != tables_.end()) return known->second;
    const bool top = level == static_cast<int>(topology_.levels.size());
    const double entries = 1.0 * (top ? 1 : cuts_.count() + 1) * cuts_.count() * count(level);
    if (entries > 5e7)
      fail_config("a topology of {} levels with {} places to cut the model is too much to search; allowed: fewer levels",
                  topology_.levels.size(), cuts_.count());
    Table table(cuts_.count(), count(level), top);
    for (int on = 1; on <= count(level); ++on)
      for (int replicas = 1; replicas <= on; ++replicas) {
        const Behind below = behind(level, after, on, replicas);
        if (level == 1) {
          fill(table, {level, on, replicas}, [&](int from, int to) { return alone(from, to, below); });
        } else {
          const Table& inner = solve(level - 1, below);
          const int all = count(level - 1);
          // A table of the top level begins at the start alone; those below are asked for any part.
          fill(table, {level, on, replicas}, [&](int from, int to) { return inner.end(from, to, all).seconds; });
        }
      }
    return tables_.emplace(std::pair(level, after), std::move(table)).first->second;
  }

  struct Last {
    int level, on, replicas;
  };

  // Parts whose last stage is on `replicas` of the `on` components.
  template <class Seconds>
  void fill(Table& table, const Last& last, const Seconds& seconds) {
    const auto& [level, on, replicas] = last;
    const bool top = level == static_cast<int>(topology_.levels.size());
    const double wire = bandwidth(level) * replicas;
    const int starts = top ? 0 : cuts_.count() - 1;
    for (int to = 0; to < cuts_.count(); ++to) {
      const double handed_on = 2 * static_cast<double>(cut(to).crossing_bytes) / wire;
      for (int before = -1; before < to; ++before) {
        if (before >= 0 && !cuts_.precedes(before, to)) continue;
        const double here = with_replicas(seconds(before, to), {before, to, replicas}, wire);
        ++considered_;
        if (here == kNoTime) continue;
        if (on == replicas) {
          if (before < starts || before < 0) put(table, {before, to, on}, {here, -2, replicas}, handed_on);
          continue;
        }
        if (before < 0) continue;
        const double arrives = std::max(here, 2 * static_cast<double>(cut(before).crossing_bytes) / wire);
        for (int from = -1; from < std::min(starts, before); ++from) {
          if (from >= 0 && !cuts_.precedes(from, before)) continue;
          ++considered_;
          const double time = std::max(arrives, table.pass(from, before, on - replicas).seconds);
          put(table, {from, to, on}, {time, before, replicas}, handed_on);
        }
      }
    }
  }

  struct Slot {
    int from, to, on;
  };

  void put(Table& table, const Slot& at, Choice choice, double handed_on) {
    auto& end = table.end(at.from, at.to, at.on);
    if (choice.seconds < end.seconds) end = choice;
    choice.seconds = std::max(choice.seconds, handed_on);
    auto& pass = table.pass(at.from, at.to, at.on);
    if (choice.seconds < pass.seconds) pass = choice;
  }

  // Replicas take minibatches by turns and average their gradients after each turn.
  double with_replicas(double seconds, const Piece& piece, double wire) const {
    const double parameters = static_cast<double>(cut(piece.to).parameter_bytes - cut(piece.from).parameter_bytes);
    return (seconds + 4 * (piece.copies - 1) * parameters / wire) / piece.copies;
  }

  void expand(int level, Behind after, const Piece& piece, std::vector<PartitionedStage>& stages) {
    if (level == 0) {
      stages.push_back({.first_cut = piece.from,
                        .last_cut = piece.to,
                        .units = cuts_.between(piece.from, piece.to),
                        .replicas = piece.copies,
                        .seconds = cut(piece.to).seconds - cut(piece.from).seconds});
      return;
    }
    const Table& table = solve(level, after);
    struct Part {
      Piece piece;
      Behind below;
    };
    std::vector<Part> parts;
    int to = piece.to, on = count(level);
    for (const Choice* choice = &table.end(piece.from, to, on);; choice = &table.pass(piece.from, to, on)) {
      const int before = choice->before == -2 ? piece.from : choice->before;
      parts.push_back({{before, to, choice->replicas}, behind(level, after, on, choice->replicas)});
      if (choice->before == -2) break;
      to = before;
      on -= choice->replicas;
    }
    for (auto part = parts.rbegin(); part != parts.rend(); ++part)
      expand(level - 1, part->below, {part->piece.from, part->piece.to, part->piece.copies * piece.copies}, stages);
  }

  const Cuts& cuts_;
  const Topology& topology_;
  const WeightMode mode_;
  const Cut nothing_{};
  std::vector<std::int64_t> size_{1};  // ranks of a component of each level
  std::map<std::pair<int, Behind>, Table> tables_;
  std::int64_t considered_ = 0;
};

// What holds of the stages together.
void describe_stages(Partition& partition, const Cuts& cuts, WeightMode mode) {
  std::vector<int> replicas;
  for (const auto& stage : partition.stages) replicas.push_back(stage.replicas);
  const schedule::RoundRobin robin{.replicas = replicas, .mode = mode};
  partition.in_flight = schedule::in_flight(robin, 0);
  for (std::size_t at = 0; at < partition.stages.size(); ++at) {
    auto& stage = partition.stages[at];
    stage.in_flight = schedule::in_flight(robin, static_cast<int>(at));
    stage.versions = schedule::most_versions(robin, static_cast<int>(at));
    stage.memory = memory_of_part(stage.first_cut < 0 ? Cut{} : cuts[stage.first_cut], cuts[stage.last_cut], stage.in_flight,
                                  stage.versions);
  }
}

}  // namespace

int Partition::ranks() const {
  return std::accumulate(stages.begin(), stages.end(), 0,
                         [](int all, const PartitionedStage& stage) { return all + stage.replicas; });
}

double data_parallel_seconds(const Cut& whole, const Topology& topology) {
  double seconds = whole.seconds;
  for (const auto& level : topology.levels)
    seconds =
        (seconds + 4 * (level.count - 1) * static_cast<double>(whole.parameter_bytes) / (level.bandwidth * level.count)) /
        level.count;
  return seconds;
}

Partition partition(const Profile& profile, const Topology& topology, WeightMode mode) {
  const Cuts cuts(profile);
  Partition found = PartitionSearch(cuts, topology, mode).best();
  if (found.stages.empty())
    fail_config("no partition of {} on {} ranks fits into {} bytes per rank; allowed: more memory, or more ranks",
                profile.model, topology.ranks(), topology.memory.value_or(0));
  describe_stages(found, cuts, mode);
  found.one_rank_seconds = cuts[cuts.count() - 1].seconds;
  found.data_parallel_seconds = data_parallel_seconds(cuts[cuts.count() - 1], topology);
  return found;
}

}  // namespace bonfire::plan
