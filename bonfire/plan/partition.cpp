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

// Whether replicas of a stage share each minibatch, and what is in flight are microbatches.
bool shares_minibatches(WeightMode mode) { return mode == WeightMode::two_buffers || mode == WeightMode::flush; }

// What is kept on a rank of a stage.
struct Kept {
  int versions = 1;
  std::int64_t forwards = 1;      // of microbatches, whose backward has not ended
  std::int64_t microbatches = 1;  // of a minibatch
};

// Where minibatches stay together, one more begins when the first microbatch of the oldest has come back.
std::int64_t forwards_kept(WeightMode mode, std::int64_t in_flight, std::int64_t microbatches, std::int64_t replicas) {
  return shares_minibatches(mode) ? std::min(in_flight, microbatches / replicas) : microbatches * (in_flight - 1) + 1;
}

StageMemory memory_of_part(const Cut& before, const Cut& until, const Kept& kept) {
  const auto part = [&](std::int64_t Cut::*member) { return until.*member - before.*member; };
  const int versions = kept.versions;
  const std::int64_t weights = part(&Cut::parameter_bytes);
  // Where an update leaves older versions as they are, the masters that it changes lie apart.
  return {.weights = weights * (versions + (versions > 1 ? 1 : 0)),
          .state = part(&Cut::state_bytes),
          .activations = part(&Cut::saved_bytes) * kept.forwards / kept.microbatches};
}

class PartitionSearch {
 public:
  struct Problem {
    WeightMode mode = WeightMode::stashing;
    int microbatches = 1;  // of a minibatch
    int first = 0;         // replicas that the first stage is to have; 0: any
  };
  PartitionSearch(const Cuts& cuts, const Topology& topology, const Problem& problem)
      : cuts_(cuts), topology_(topology), problem_(problem) {
    for (const auto& level : topology.levels) size_.push_back(size_.back() * level.count);
  }

  Partition best() {
    const int top = static_cast<int>(topology_.levels.size());
    const Table& table = solve({top, {}, 1});
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

  // What a component of some level is to run its part of the model for.
  struct Task {
    int level;
    Behind after;
    int copies;  // of the component, where that counts: see counts_copies()
    auto operator<=>(const Task&) const = default;
  };

  bool shares() const { return shares_minibatches(problem_.mode); }
  // Whether a stage's time or memory depends on all of its replicas, and not only on those within a component.
  bool counts_copies() const { return shares() || problem_.first > 0; }

  int count(int level) const { return topology_.levels[static_cast<std::size_t>(level - 1)].count; }
  double bandwidth(int level) const { return topology_.levels[static_cast<std::size_t>(level - 1)].bandwidth; }
  std::int64_t ranks_below(int level) const { return size_[static_cast<std::size_t>(level - 1)]; }
  const Cut& cut(int at) const { return at < 0 ? nothing_ : cuts_[at]; }

  // What lies behind each of `replicas` components that run a stage, where the stages up to it are on `used` components.
  Behind behind(int level, Behind after, int used, int replicas) const {
    if (!topology_.memory && problem_.mode != WeightMode::two_buffers) return {};
    return after.plus((count(level) - used) * ranks_below(level)).over(replicas);
  }

  // One rank of `replicas` (those that count).
  double alone(int from, int to, const Task& task) const {
    const double seconds = cut(to).seconds - cut(from).seconds;
    const int replicas = task.copies, in_flight = static_cast<int>(1 + task.after.rounded_up());
    if (shares() && problem_.microbatches % replicas != 0) return kNoTime;
    // Otherwise a minibatch would begin before the update that it is to see.
    if (problem_.mode == WeightMode::two_buffers && in_flight > problem_.microbatches / replicas + 1) return kNoTime;
    if (problem_.first > 0 && from < 0 && replicas != problem_.first) return kNoTime;
    if (topology_.memory) {
      const Kept kept{
          .versions = versions_held(in_flight, replicas),
          .forwards = forwards_kept(problem_.mode, in_flight, problem_.microbatches, replicas),
          .microbatches = problem_.microbatches,
      };
      if (memory_of_part(cut(from), cut(to), kept).total() > *topology_.memory) return kNoTime;
    }
    if (!shares()) return seconds;
    // A minibatch of its own fills the pipeline and empties it: while a replica waits, one microbatch is on all the others.
    const double waits = problem_.mode == WeightMode::flush ? cuts_[cuts_.count() - 1].seconds - seconds : 0;
    return seconds / replicas + waits / problem_.microbatches;
  }

  int versions_held(int in_flight, int replicas) const {
    switch (problem_.mode) {
      case WeightMode::stashing: return in_flight;
      case WeightMode::vertical:
        return schedule::vertical_versions({.ranks = topology_.ranks(), .first = problem_.first, .own = replicas});
      case WeightMode::two_buffers: return 2;
      case WeightMode::flush: return 1;
    }
    return 1;
  }

  const Table& solve(const Task& task) {
    const auto [level, after, copies] = task;
    const auto known = tables_.find(task);
    if (known != tables_.end()) return known->second;
    const bool top = level == static_cast<int>(topology_.levels.size());
    const double entries = 1.0 * (top ? 1 : cuts_.count() + 1) * cuts_.count() * count(level);
    if (entries > 5e7)
      fail_config("a topology of {} levels with {} places to cut the model is too much to search; allowed: fewer levels",
                  topology_.levels.size(), cuts_.count());
    Table table(cuts_.count(), count(level), top);
    for (int on = 1; on <= count(level); ++on)
      for (int replicas = 1; replicas <= on; ++replicas) {
        const Task below{level - 1, behind(level, after, on, replicas), counts_copies() ? copies * replicas : 1};
        if (level == 1) {
          fill(table, {level, on, replicas, copies}, [&](int from, int to) { return alone(from, to, below); });
        } else {
          const Table& inner = solve(below);
          const int all = count(level - 1);
          // A table of the top level begins at the start alone; those below are asked for any part.
          fill(table, {level, on, replicas, copies}, [&](int from, int to) { return inner.end(from, to, all).seconds; });
        }
      }
    return tables_.emplace(task, std::move(table)).first->second;
  }

  struct Last {
    int level, on, replicas;
    int copies;  // of the component that they are in, where that counts
  };

  // Parts whose last stage is on `replicas` of the `on` components.
  template <class Seconds>
  void fill(Table& table, const Last& last, const Seconds& seconds) {
    const auto& [level, on, replicas, copies] = last;
    const bool top = level == static_cast<int>(topology_.levels.size());
    // Of what crosses, each copy that shares minibatches has its part.
    const double wire = bandwidth(level) * replicas * (shares() ? copies : 1);
    const int starts = top ? 0 : cuts_.count() - 1;
    for (int to = 0; to < cuts_.count(); ++to) {
      const double handed_on = 2 * static_cast<double>(cut(to).crossing_bytes) / wire;
      for (int before = -1; before < to; ++before) {
        if (before >= 0 && !cuts_.precedes(before, to)) continue;
        const double here = with_replicas(seconds(before, to), {before, to, replicas}, bandwidth(level));
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

  // Replicas take minibatches by turns and average their gradients after each turn; or they share each minibatch, and
  // average after each of them.
  double with_replicas(double seconds, const Piece& piece, double bandwidth) const {
    const double parameters = static_cast<double>(cut(piece.to).parameter_bytes - cut(piece.from).parameter_bytes);
    const double averages = 4 * (piece.copies - 1) * parameters / (bandwidth * piece.copies);
    return shares() ? seconds + averages : (seconds + averages) / piece.copies;
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
    const Table& table = solve({level, after, counts_copies() ? piece.copies : 1});
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
  const Problem problem_;
  const Cut nothing_{};
  std::vector<std::int64_t> size_{1};  // ranks of a component of each level
  std::map<Task, Table> tables_;
  std::int64_t considered_ = 0;
};

// What holds of the stages together.
void describe_stages(Partition& partition, const Cuts& cuts, const PartitionSearch::Problem& problem) {
  schedule::RoundRobin robin{.mode = problem.mode, .microbatches = problem.microbatches};
  robin.replicas.clear();
  for (const auto& stage : partition.stages) robin.replicas.push_back(stage.replicas);
  partition.in_flight = schedule::in_flight(robin, 0);
  partition.microbatches = problem.microbatches;
  for (std::size_t at = 0; at < partition.stages.size(); ++at) {
    auto& stage = partition.stages[at];
    stage.in_flight = schedule::in_flight(robin, static_cast<int>(at));
    stage.versions = schedule::most_versions(robin, static_cast<int>(at));
    stage.memory =
        memory_of_part(stage.first_cut < 0 ? Cut{} : cuts[stage.first_cut], cuts[stage.last_cut],
                       {.versions = stage.versions,
                        .forwards = forwards_kept(problem.mode, stage.in_flight, problem.microbatches, stage.replicas),
                        .microbatches = problem.microbatches});
  }
}

int microbatches_for(const Profile& profile, const PartitionOptions& options) {
  const auto known = options.microbatches > 0 ? options.microbatches : profile.microbatches();
  if (known > 1 << 20) fail_config("minibatches of {} microbatches; allowed: up to {}", known, 1 << 20);
  if (known > 0) return static_cast<int>(known);
  if (shares_minibatches(options.mode))
    fail_config(
        "schedule {}: replicas share minibatches, and the profile of {} does not say how many microbatches one has; "
        "allowed: --microbatches of 1 or more",
        schedule::name_of(options.mode), profile.model);
  return 1;
}

// How many versions a stage keeps with vertical synchronisation depends on the first one: all that it may be are tried.
Partition best_of(const Cuts& cuts, const Topology& topology, PartitionSearch::Problem problem) {
  if (problem.mode != WeightMode::vertical || !topology.memory) return PartitionSearch(cuts, topology, problem).best();
  Partition best{.seconds = kNoTime};
  std::int64_t considered = 0;
  for (problem.first = 1; problem.first <= topology.ranks(); ++problem.first) {
    auto found = PartitionSearch(cuts, topology, problem).best();
    considered += found.considered;
    if (found.seconds < best.seconds) best = std::move(found);
  }
  best.considered = considered;
  return best;
}

}  // namespace

int Partition::ranks() const {
  return std::accumulate(stages.begin(), stages.end(), 0,
                         [](int all, const PartitionedStage& stage) { return all + stage.replicas; });
}

double data_parallel_seconds(const Cut& whole, const Topology& topology, WeightMode mode) {
  double seconds = whole.seconds;
  if (shares_minibatches(mode)) seconds /= topology.ranks();
  for (const auto& level : topology.levels) {
    seconds += 4 * (level.count - 1) * static_cast<double>(whole.parameter_bytes) / (level.bandwidth * level.count);
    if (!shares_minibatches(mode)) seconds /= level.count;
  }
  return seconds;
}

Partition partition(const Profile& profile, const Topology& topology, const PartitionOptions& options) {
  const Cuts cuts(profile);
  const PartitionSearch::Problem problem{.mode = options.mode, .microbatches = microbatches_for(profile, options)};
  Partition found = best_of(cuts, topology, problem);
  if (found.stages.empty() && topology.memory)
    fail_config("no partition of {} on {} ranks fits into {} bytes per rank; allowed: more memory, or more ranks{}",
                profile.model, topology.ranks(), *topology.memory,
                shares_minibatches(options.mode) ? ", or other microbatches" : "");
  if (found.stages.empty())
    fail_config(
        "no partition of {} on {} ranks has replicas that share minibatches of {} microbatches, and enough of them to fill "
        "its pipeline ({}); allowed: another number of them, or of ranks",
        profile.model, topology.ranks(), problem.microbatches, schedule::name_of(options.mode));
  describe_stages(found, cuts, problem);
  found.one_rank_seconds = cuts[cuts.count() - 1].seconds;
  found.data_parallel_seconds = data_parallel_seconds(cuts[cuts.count() - 1], topology, options.mode);
  return found;
}

}  // namespace bonfire::plan
