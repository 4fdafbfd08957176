#include "bonfire/schedule/lowering.h"

#include <algorithm>
#include <map>
#include <set>

#include "bonfire/base/error.h"

namespace bonfire::schedule {
namespace {

bool is_step(const Action& action) { return is_compute(action.kind) && action.kind != Kind::update; }

// Stages in the order in which the row comes to them.
std::vector<std::int32_t> stages_of(const std::vector<Action>& row) {
  std::vector<std::int32_t> stages;
  for (const Action& action : row) {
    if (is_step(action) && std::find(stages.begin(), stages.end(), action.stage) == stages.end())
      stages.push_back(action.stage);
  }
  return stages;
}

// What a computation reads from another rank, if it does.
struct Input {
  Position maker;
  Action receive;
};

Input input_of(const Schedule& schedule, const Index& index, const Action& action) {
  if (action.kind == Kind::forward && action.stage > 0)
    return {index.find(Kind::forward, action.stage - 1, action.microbatch),
            {action.stage, Kind::receive_forward, action.microbatch}};
  if (makes_input_gradient(action.kind) && action.stage + 1 < schedule.stages)
    return {index.input_gradient(action.stage + 1, action.microbatch),
            {action.stage, Kind::receive_backward, action.microbatch}};
  return {};
}

// The cell that reads what a computation makes, and the send between them.
struct Output {
  Position reader;
  Action send;
};

Output output_of(const Schedule& schedule, const Index& index, const Action& action) {
  if (action.kind == Kind::forward && action.stage + 1 < schedule.stages)
    return {index.find(Kind::forward, action.stage + 1, action.microbatch),
            {action.stage, Kind::send_forward, action.microbatch}};
  if (makes_input_gradient(action.kind) && action.stage > 0)
    return {index.input_gradient(action.stage - 1, action.microbatch),
            {action.stage, Kind::send_backward, action.microbatch}};
  return {};
}

// Cells to put before the cells of a row: those of cell `at` are in `before[at]`, in order; the last entry is the row's end.
using Insertions = std::vector<std::vector<Action>>;

std::vector<Action> insert(const std::vector<Action>& row, const Insertions& before) {
  std::vector<Action> result;
  result.reserve(2 * row.size());
  for (std::size_t at = 0; at <= row.size(); ++at) {
    result.insert(result.end(), before[at].begin(), before[at].end());
    if (at < row.size()) result.push_back(row[at]);
  }
  return result;
}

}  // namespace

Schedule add_messages(Schedule schedule) {
  const Index index(schedule);
  // Where each receive goes: before which cell of the row. All receives of one direction of a pair are issued in the order
  // of the sends, so none may come after the next one.
  struct Receive {
    std::int32_t before;
    std::int32_t from;
    std::int32_t made;  // when: the maker's place in its row
    Action action;
  };
  std::vector<std::vector<Action>> rows;
  for (std::int32_t rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& row = schedule.rows[static_cast<std::size_t>(rank)];
    std::vector<Receive> receives;
    for (std::int32_t at = 0; at < static_cast<std::int32_t>(row.size()); ++at) {
      const Input input = input_of(schedule, index, row[static_cast<std::size_t>(at)]);
      if (input.maker && input.maker.rank != rank) receives.push_back({at, input.maker.rank, input.maker.at, input.receive});
    }
    std::stable_sort(receives.begin(), receives.end(), [](const Receive& a, const Receive& b) {
      return std::pair(a.from, a.made) < std::pair(b.from, b.made);
    });
    for (std::size_t i = receives.size(); i-- > 1;) {
      Receive& earlier = receives[i - 1];
      if (earlier.from == receives[i].from) earlier.before = std::min(earlier.before, receives[i].before);
    }
    std::stable_sort(receives.begin(), receives.end(),
                     [](const Receive& a, const Receive& b) { return a.before < b.before; });

    std::vector<Action> result;
    result.reserve(3 * row.size());
    std::size_t next = 0;
    for (std::int32_t at = 0; at < static_cast<std::int32_t>(row.size()); ++at) {
      const Action& action = row[static_cast<std::size_t>(at)];
      for (; next < receives.size() && receives[next].before == at; ++next) result.push_back(receives[next].action);
      result.push_back(action);
      const Output output = output_of(schedule, index, action);
      if (output.reader && output.reader.rank != rank) result.push_back(output.send);
    }
    rows.push_back(std::move(result));
  }
  schedule.rows = std::move(rows);
  return schedule;
}

Schedule overlap_messages(Schedule schedule, int ahead) {
  require(ahead >= 0, "receives {} computations ahead; allowed: 0 or more", ahead);
  for (auto& row : schedule.rows) {
    // Each receive belongs to the computation that follows it; it moves to the computation `ahead` before that.
    std::vector<std::size_t> steps;  // computations, by their number among what is no receive
    std::vector<Action> rest;
    std::vector<std::pair<std::size_t, Action>> receives;  // before which computation
    for (const Action& action : row) {
      if (is_receive(action.kind)) {
        receives.emplace_back(steps.size(), action);
        continue;
      }
      if (is_step(action)) steps.push_back(rest.size());
      rest.push_back(action);
    }
    std::vector<Action> result;
    result.reserve(row.size());
    std::size_t next = 0, step = 0;
    for (std::size_t at = 0; at < rest.size(); ++at) {
      if (step < steps.size() && steps[step] == at) {
        for (; next < receives.size() && receives[next].first <= step + static_cast<std::size_t>(ahead); ++next)
          result.push_back(receives[next].second);
        ++step;
      }
      result.push_back(rest[at]);
    }
    for (; next < receives.size(); ++next) result.push_back(receives[next].second);
    row = std::move(result);
  }
  return schedule;
}

Schedule add_sharding(Schedule schedule, int resident) {
  require(resident >= 1, "{} stages gathered at once; allowed: 1 or more", resident);
  for (auto& row : schedule.rows) {
    // Runs of computations of one stage.
    struct Run {
      std::size_t begin, last;
      std::int32_t stage;
    };
    std::vector<Run> runs;
    for (std::size_t at = 0; at < row.size(); ++at) {
      if (!is_step(row[at])) continue;
      if (runs.empty() || runs.back().stage != row[at].stage) runs.push_back({at, at, row[at].stage});
      runs.back().last = at;
    }
    constexpr std::size_t kNever = ~std::size_t{0};
    // Per run: the number of the next run of its stage.
    std::vector<std::size_t> again(runs.size(), kNever);
    std::map<std::int32_t, std::size_t> later;
    for (std::size_t i = runs.size(); i-- > 0;) {
      const auto found = later.find(runs[i].stage);
      if (found != later.end()) again[i] = found->second;
      later[runs[i].stage] = i;
    }

    Insertions before(row.size() + 1);
    std::map<std::int32_t, std::size_t> gathered;  // stage: its next run
    for (std::size_t i = 0; i < runs.size(); ++i) {
      // This run's stage and those that come next, as many as fit.
      std::vector<std::int32_t> wanted;
      for (std::size_t k = i; k < runs.size() && wanted.size() < static_cast<std::size_t>(resident); ++k) {
        // Nobody looks further than the stages of a rank go round.
        if (k > i + gathered.size() + static_cast<std::size_t>(2 * resident)) break;
        if (std::find(wanted.begin(), wanted.end(), runs[k].stage) == wanted.end()) wanted.push_back(runs[k].stage);
      }
      for (const std::int32_t stage : wanted) {
        if (gathered.contains(stage)) continue;
        if (gathered.size() >= static_cast<std::size_t>(resident)) {
          // The one that is needed last makes room. It is never one that is wanted: there are no more of those than fit.
          auto victim = gathered.end();
          for (auto it = gathered.begin(); it != gathered.end(); ++it) {
            if (std::find(wanted.begin(), wanted.end(), it->first) != wanted.end()) continue;
            if (victim == gathered.end() || it->second > victim->second) victim = it;
          }
          before[runs[i].begin].push_back({victim->first, Kind::reshard});
          gathered.erase(victim);
        }
        before[runs[i].begin].push_back({stage, Kind::unshard});
        gathered[stage] = i;
      }
      gathered[runs[i].stage] = again[i];
      if (again[i] == kNever) {
        before[runs[i].last + 1].push_back({runs[i].stage, Kind::reshard});
        gathered.erase(runs[i].stage);
      }
    }
    row = insert(row, before);
  }
  return schedule;
}

Schedule add_reductions(Schedule schedule, Reduce when) {
  for (auto& row : schedule.rows) {
    Insertions before(row.size() + 1);
    std::set<std::int32_t> reduced;  // stages whose gradients are complete from here to their next update
    for (std::size_t at = row.size(); at-- > 0;) {
      const Action& action = row[at];
      if (action.kind == Kind::update) reduced.erase(action.stage);
      if (ends_activation(action.kind) && (reduced.insert(action.stage).second || when == Reduce::each))
        before[at + 1].push_back({action.stage, Kind::reduce});
    }
    row = insert(row, before);
  }
  return schedule;
}

Schedule add_ties(Schedule schedule, const std::vector<std::vector<int>>& groups) {
  for (auto& row : schedule.rows) {
    Insertions before(row.size() + 1);
    for (std::size_t at = 0; at < row.size(); ++at) {
      if (row[at].kind != Kind::update) continue;
      for (std::size_t group = 0; group < groups.size(); ++group) {
        if (std::find(groups[group].begin(), groups[group].end(), row[at].stage) != groups[group].end())
          before[at].push_back({row[at].stage, Kind::tie, static_cast<std::int32_t>(group)});
      }
    }
    row = insert(row, before);
  }
  return schedule;
}

Schedule add_updates(Schedule schedule) {
  for (auto& row : schedule.rows) {
    for (const std::int32_t stage : stages_of(row)) row.push_back({stage, Kind::update});
  }
  return schedule;
}

Schedule forwards_only(const Schedule& schedule) {
  Schedule result{schedule.stages, schedule.microbatches, {}};
  for (const auto& row : schedule.rows) {
    auto& kept = result.rows.emplace_back();
    std::copy_if(row.begin(), row.end(), std::back_inserter(kept), [](const Action& a) { return a.kind == Kind::forward; });
  }
  return result;
}

Schedule lower(Schedule schedule, const LowerOptions& options) {
  const Contents has = contents(schedule);
  if (has.backward && !has.updates) schedule = add_updates(std::move(schedule));
  if (options.sharded_parameters && !has.sharding) schedule = add_sharding(std::move(schedule), options.resident);
  if (has.backward && options.reductions && !has.reductions) schedule = add_reductions(std::move(schedule), options.reduce);
  if (has.backward && !options.tied.empty() && !has.ties) schedule = add_ties(std::move(schedule), options.tied);
  if (!has.messages) schedule = overlap_messages(add_messages(std::move(schedule)), options.receive_ahead);
  return schedule;
}

}  // namespace bonfire::schedule
