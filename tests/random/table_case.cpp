#include "tests/random/table_case.h"

#include <algorithm>
#include <map>
#include <set>

#include "bonfire/base/error.h"
#include "bonfire/schedule/generate.h"

namespace bonfire::cases {

using schedule::Action;
using schedule::Kind;
using schedule::Schedule;

namespace {

// Computations in an order that some clock allows: whatever is ready may come next, on whichever rank.
Schedule written(Draw draw, int ranks, int stages, int microbatches) {
  Schedule table{stages, microbatches, {}};
  table.rows.resize(static_cast<std::size_t>(ranks));
  std::vector<int> owner;
  for (int stage = 0; stage < stages; ++stage) owner.push_back(stage < ranks ? stage : draw.below(ranks));
  if (draw.chance(50)) {
    const auto order = draw.permutation(stages);
    std::vector<int> mixed;
    for (const int at : order) mixed.push_back(owner[static_cast<std::size_t>(at)]);
    owner = mixed;
  }
  std::vector<std::vector<bool>> halves(static_cast<std::size_t>(stages));  // the backward in two parts
  const int split = draw.pick({0, 0, 0, 50, 100});
  for (auto& row : halves)
    for (int at = 0; at < microbatches; ++at) row.push_back(draw.chance(split));
  std::set<std::tuple<int, int, int>> done;  // kind, stage, microbatch
  const auto is_done = [&](Kind kind, int stage, int microbatch) {
    return done.contains({static_cast<int>(kind), stage, microbatch});
  };
  const int eager = draw.pick({20, 50, 80});  // how much it likes backwards
  for (;;) {
    std::vector<Action> forwards, backwards;
    for (int stage = 0; stage < stages; ++stage)
      for (int at = 0; at < microbatches; ++at) {
        const bool half = halves[static_cast<std::size_t>(stage)][static_cast<std::size_t>(at)];
        const Kind back = half ? Kind::input_gradient : Kind::backward;
        if (!is_done(Kind::forward, stage, at)) {
          if (stage == 0 || is_done(Kind::forward, stage - 1, at)) forwards.push_back({stage, Kind::forward, at});
        } else if (!is_done(back, stage, at)) {
          if (stage + 1 == stages || is_done(Kind::backward, stage + 1, at) || is_done(Kind::input_gradient, stage + 1, at))
            backwards.push_back({stage, back, at});
        } else if (half && !is_done(Kind::weight_gradient, stage, at)) {
          backwards.push_back({stage, Kind::weight_gradient, at});
        }
      }
    if (forwards.empty() && backwards.empty()) return table;
    const auto& from = forwards.empty() || (!backwards.empty() && draw.chance(eager)) ? backwards : forwards;
    const Action next = from[static_cast<std::size_t>(draw.below(static_cast<int>(from.size())))];
    table.rows[static_cast<std::size_t>(owner[static_cast<std::size_t>(next.stage)])].push_back(next);
    done.insert({static_cast<int>(next.kind), next.stage, next.microbatch});
  }
}

void drop(Schedule& table, Kind kind) {
  for (auto& row : table.rows) std::erase_if(row, [&](const Action& action) { return action.kind == kind; });
}

// Where in a row the gradients of each stage are complete.
std::map<int, std::size_t> last_gradients(const std::vector<Action>& row) {
  std::map<int, std::size_t> last;
  for (std::size_t at = 0; at < row.size(); ++at)
    if (schedule::ends_activation(row[at].kind)) last[row[at].stage] = at;
  return last;
}

void add_reductions(Draw draw, TableCase& each, bool shares) {
  for (auto& row : each.table.rows) {
    const auto last = last_gradients(row);
    std::vector<Action> result;
    for (std::size_t at = 0; at < row.size(); ++at) {
      result.push_back(row[at]);
      if (!schedule::ends_activation(row[at].kind)) continue;
      const bool fits = each.reductions == OwnReductions::fitting;
      const bool must = last.at(row[at].stage) == at && (fits || !draw.chance(15));
      const bool more = fits ? shares : draw.chance(50);
      if (must || more) result.push_back({row[at].stage, Kind::reduce});
    }
    row = std::move(result);
  }
}

// As early as the gradients are there, or anywhere later.
void add_updates(Draw draw, TableCase& each) {
  drop(each.table, Kind::update);
  for (auto& row : each.table.rows)
    for (const auto& entry : last_gradients(row)) {
      const int stage = entry.first;
      std::size_t first = 0;
      for (std::size_t at = 0; at < row.size(); ++at)
        if (row[at].stage == stage) first = at + 1;
      const auto room = static_cast<int>(row.size() - first);
      row.insert(row.begin() + static_cast<std::ptrdiff_t>(first) + draw.below(room + 1), {stage, Kind::update});
    }
}

// All of a rank's stages at once.
void add_sharding(TableCase& each) {
  for (auto& row : each.table.rows) {
    std::map<int, std::size_t> last;
    for (std::size_t at = 0; at < row.size(); ++at)
      if (schedule::is_compute(row[at].kind) && row[at].kind != Kind::update) last[row[at].stage] = at;
    std::vector<Action> result;
    for (const auto& [stage, at] : last) result.push_back({stage, Kind::unshard});
    for (std::size_t at = 0; at < row.size(); ++at) {
      result.push_back(row[at]);
      if (schedule::is_compute(row[at].kind) && row[at].kind != Kind::update && last.at(row[at].stage) == at)
        result.push_back({row[at].stage, Kind::reshard});
    }
    row = std::move(result);
  }
}

}  // namespace

TableCase draw_table(Draw draw, const TableShape& shape) {
  TableCase each{.ranks = shape.ranks, .microbatches = draw.between(1, 5)};
  const auto& names = schedule::schedule_names();
  each.name = draw.chance(50) ? "written" : names[static_cast<std::size_t>(draw.below(static_cast<int>(names.size())))];
  if (each.name == "naive") each.microbatches = 1;
  each.chunks = schedule::natural_chunks(each.name == "written" ? "1f1b" : each.name);
  if (each.name != "written") {
    try {
      each.table =
          schedule::generate(each.name, {.ranks = each.ranks, .microbatches = each.microbatches, .chunks = each.chunks});
    } catch (const ConfigError&) {
      each.name = "written";  // there is no such schedule for this number of microbatches
    }
    if (each.table.stages > shape.most_stages) each.name = "written";
  }
  if (each.name == "written")
    each.table = written(draw.fork("table"), shape.ranks, draw.between(shape.ranks, shape.most_stages), each.microbatches);
  if (draw.chance(40)) each.reductions = draw.chance(35) ? OwnReductions::fitting : OwnReductions::misfit;
  each.own_updates = draw.chance(30);
  each.own_sharding = shape.gathers && draw.chance(20);
  if (each.reductions != OwnReductions::none) add_reductions(draw.fork("reductions"), each, shape.shares);
  if (each.own_updates) add_updates(draw.fork("updates"), each);
  if (each.own_sharding) add_sharding(each);
  return each;
}

}  // namespace bonfire::cases
