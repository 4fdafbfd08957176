#include "bonfire/schedule/validate.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_set>

#include <fmt/ranges.h>

#include "bonfire/schedule/text.h"
#include "bonfire/schedule/wiring.h"

namespace bonfire::schedule {
namespace {

// One check a function. The first that finds something throws it: the later ones rely on the earlier.
class Checker {
 public:
  Checker(const Schedule& schedule, const Limits& limits)
      : schedule_(schedule), limits_(limits), contents_(contents(schedule)) {}

  void check() const {
    check_numbers();
    const Index index(schedule_);
    check_once(index);
    check_order(index);
    check_updates();
    if (contents_.messages) {
      check_messages(index);
      check_links(index);
    }
    if (contents_.sharding) check_sharding();
    if (contents_.reductions) check_reductions();
    if (contents_.ties) check_ties();
    if (limits_.tied && contents_.backward) check_tied_stages();
    check_deadlock(index);
    check_activations();
  }

 private:
  template <class... Args>
  [[noreturn]] void problem(Position cell, fmt::format_string<Args...> format, Args&&... args) const {
    throw Problem{cell, fmt::format("rank {}, cell {}, '{}': {}", cell.rank, cell.at, to_text(schedule_.at(cell)),
                                    fmt::format(format, std::forward<Args>(args)...))};
  }

  template <class Visit>  // visit(Position, const Action&)
  void each_cell(Visit visit) const {
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) each_cell_of(rank, visit);
  }
  template <class Visit>
  void each_cell_of(std::int32_t rank, Visit visit) const {
    const auto& row = schedule_.rows[static_cast<std::size_t>(rank)];
    for (std::int32_t at = 0; at < static_cast<std::int32_t>(row.size()); ++at)
      visit(Position{rank, at}, row[static_cast<std::size_t>(at)]);
  }

  static bool is_step(Kind kind) { return is_compute(kind) && kind != Kind::update; }

  void check_numbers() const {
    std::int64_t forwards = 0;
    each_cell([&](Position cell, const Action& action) {
      if (action.stage < 0 || action.stage >= schedule_.stages)
        problem(cell, "stage {}; allowed: 0 to {}", action.stage, schedule_.stages - 1);
      if (has_microbatch(action.kind) && action.kind != Kind::tie &&
          (action.microbatch < 0 || action.microbatch >= schedule_.microbatches))
        problem(cell, "microbatch {}; allowed: 0 to {}", action.microbatch, schedule_.microbatches - 1);
      if (action.kind == Kind::forward) ++forwards;
    });
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      if (schedule_.rows[static_cast<std::size_t>(rank)].empty())
        throw Problem{{}, fmt::format("rank {} does nothing", rank)};
    }
    if (schedule_.rows.empty() || schedule_.stages < 1 || schedule_.microbatches < 1)
      throw Problem{{}, "the table is empty"};
    // Fewer forwards than places: found here, where a number with a slip in it has not yet cost memory.
    if (forwards < std::int64_t{schedule_.stages} * schedule_.microbatches) report_missing_forward();
  }

  [[noreturn]] void report_missing_forward() const {
    std::unordered_set<std::int64_t> seen;
    const auto key = [&](std::int64_t stage, std::int64_t microbatch) {
      return stage * schedule_.microbatches + microbatch;
    };
    each_cell([&](Position, const Action& action) {
      if (action.kind == Kind::forward) seen.insert(key(action.stage, action.microbatch));
    });
    for (int microbatch = 0; microbatch < schedule_.microbatches; ++microbatch) {
      for (int stage = 0; stage < schedule_.stages; ++stage) {
        if (seen.contains(key(stage, microbatch))) continue;
        const Action missing{stage, Kind::forward, microbatch};
        // The cell to look at: one that speaks of the missing one, or one of its stage, or of its microbatch.
        Position nearest{0, 0};
        int best = 0;
        each_cell([&](Position cell, const Action& action) {
          const int score = 2 * (action.stage == stage) + (action.microbatch == microbatch);
          if (score > best) {
            best = score;
            nearest = cell;
          }
        });
        problem(nearest,
                "'{}' is missing: the table has {} stages and {} microbatches, and each microbatch goes through each stage",
                to_text(missing), schedule_.stages, schedule_.microbatches);
      }
    }
    throw Problem{{0, 0}, "a forward is missing"};
  }

  void check_once(const Index& index) const {
    if (!index.repeated().empty()) {
      const Position again = index.repeated().front();
      const Action& action = schedule_.at(again);
      const Position first = index.find(action.kind, action.stage, action.microbatch);
      problem(again, "it comes a second time; the first is on rank {}, cell {}", first.rank, first.at);
    }
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      for (int i = 0; i < schedule_.microbatches; ++i) {
        const Position forward = index.find(Kind::forward, stage, i), whole = index.find(Kind::backward, stage, i);
        const Position input = index.find(Kind::input_gradient, stage, i),
                       weight = index.find(Kind::weight_gradient, stage, i);
        if (!forward) report_missing_forward();
        if (whole && (input || weight))
          problem(input ? input : weight, "the backward is already whole in '{}'", to_text(schedule_.at(whole)));
        if (input && !weight) problem(input, "'{}' is missing", to_text({stage, Kind::weight_gradient, i}));
        if (weight && !input) problem(weight, "'{}' is missing", to_text({stage, Kind::input_gradient, i}));
        if (contents_.backward && !whole && !input)
          problem(forward, "its backward '{}' is missing", to_text({stage, Kind::backward, i}));
        for (const Position backward : {whole, input, weight}) {
          if (backward && backward.rank != forward.rank)
            problem(backward, "its activation is on rank {}, which ran '{}'", forward.rank, to_text(schedule_.at(forward)));
        }
        if (const Position first = index.find(Kind::forward, stage, 0);
            limits_.one_rank_per_stage && forward.rank != first.rank)
          problem(forward, "stage {} is on rank {} for microbatch 0; allowed: one rank for all microbatches of a stage",
                  stage, first.rank);
      }
    }
  }

  // Within a rank; between ranks the clock sees it.
  void check_order(const Index& index) const {
    each_cell([&](Position cell, const Action& action) {
      const auto after = [&](Position earlier) {
        if (earlier && earlier.rank == cell.rank && earlier.at > cell.at)
          problem(cell, "it needs '{}', which comes later, in cell {}", to_text(schedule_.at(earlier)), earlier.at);
      };
      if (action.kind == Kind::forward && action.stage > 0)
        after(index.find(Kind::forward, action.stage - 1, action.microbatch));
      if (makes_input_gradient(action.kind)) {
        after(index.find(Kind::forward, action.stage, action.microbatch));
        if (action.stage + 1 < schedule_.stages) after(index.input_gradient(action.stage + 1, action.microbatch));
      }
      if (action.kind == Kind::weight_gradient) after(index.find(Kind::input_gradient, action.stage, action.microbatch));
    });
  }

  void check_updates() const {
    if (!contents_.updates) return;
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      std::map<std::int32_t, Position> last_step, update;
      each_cell_of(rank, [&](Position cell, const Action& action) {
        if (is_step(action.kind)) {
          last_step[action.stage] = cell;
          if (update.contains(action.stage) && !limits_.many_updates)
            problem(cell, "it comes after the stage's update '{}' in cell {}", to_text(schedule_.at(update[action.stage])),
                    update[action.stage].at);
        } else if (action.kind == Kind::update) {
          if (!last_step.contains(action.stage)) problem(cell, "rank {} has not computed stage {}", rank, action.stage);
          if (update.contains(action.stage) && !limits_.many_updates) problem(cell, "the stage is updated a second time");
          update[action.stage] = cell;
        }
      });
      for (const auto& [stage, cell] : last_step) {
        if (!update.contains(stage))
          problem(cell, "the update '{}' is missing on rank {}", to_text({stage, Kind::update}), rank);
      }
    }
  }

  void check_messages(const Index& index) const {
    each_cell([&](Position cell, const Action& action) {
      const Kind kind = action.kind;
      const int stage = action.stage, i = action.microbatch;
      if (kind == Kind::forward && stage + 1 < schedule_.stages) {
        const Position reader = index.find(Kind::forward, stage + 1, i);
        check_crossing({cell, reader, {stage, Kind::send_forward, i}, {stage + 1, Kind::receive_forward, i}}, index);
      } else if (makes_input_gradient(kind) && stage > 0) {
        const Position reader = index.input_gradient(stage - 1, i);
        check_crossing({cell, reader, {stage, Kind::send_backward, i}, {stage - 1, Kind::receive_backward, i}}, index);
      } else if (is_message(kind)) {
        // Its two ends: maker and reader.
        const bool forward = kind == Kind::send_forward || kind == Kind::receive_forward;
        const int other = is_send(kind) == forward ? stage + 1 : stage - 1;
        if (other < 0 || other >= schedule_.stages) problem(cell, "there is no stage {} at the other end", other);
        const auto end = [&](int of) { return forward ? index.find(Kind::forward, of, i) : index.input_gradient(of, i); };
        const Position here = end(stage), there = end(other);
        if (!here || !there) problem(cell, "there is nothing to carry: this table has no such backward");
        if (here.rank == there.rank) problem(cell, "both ends are on rank {}; a message goes to another rank", here.rank);
        if (here.rank != cell.rank)
          problem(cell, "it belongs to rank {}, which has '{}'", here.rank, to_text(schedule_.at(here)));
      }
    });
  }

  struct Crossing {
    Position maker, reader;
    Action send, receive;
  };

  void check_crossing(const Crossing& crossing, const Index& index) const {
    const auto& [maker, reader, send, receive] = crossing;
    if (maker.rank == reader.rank) return;
    const Position sent = index.find(send.kind, send.stage, send.microbatch);
    const Position received = index.find(receive.kind, receive.stage, receive.microbatch);
    if (!sent)
      problem(maker, "the send '{}' is missing: '{}' on rank {} needs it", to_text(send), to_text(schedule_.at(reader)),
              reader.rank);
    if (!received)
      problem(reader, "the receive '{}' is missing: rank {} sends it with '{}'", to_text(receive), maker.rank,
              to_text(send));
    if (sent.rank == maker.rank && sent.at < maker.at)
      problem(sent, "it sends what '{}' makes later", to_text(schedule_.at(maker)));
    if (received.rank == reader.rank && received.at > reader.at)
      problem(reader, "it needs '{}', which is received later, in cell {}", to_text(receive), received.at);
  }

  // What was issued to one direction of a pair runs in that order: the n-th send must meet the n-th receive.
  void check_links(const Index& index) const {
    const auto sender_of = [&](const Action& receive) {
      return receive.kind == Kind::receive_forward ? Action{receive.stage - 1, Kind::send_forward, receive.microbatch}
                                                   : Action{receive.stage + 1, Kind::send_backward, receive.microbatch};
    };
    std::map<std::pair<std::int32_t, std::int32_t>, Position> last;  // per direction: where the send of the last receive was
    each_cell([&](Position cell, const Action& action) {
      if (!is_receive(action.kind)) return;
      const Action send = sender_of(action);
      const Position sent = index.find(send.kind, send.stage, send.microbatch);
      Position& before = last[{sent.rank, cell.rank}];
      if (before && sent.at < before.at)
        problem(cell, "rank {} sends '{}' before '{}', but here it is received after that", sent.rank, to_text(send),
                to_text(schedule_.at(before)));
      before = sent;
    });
  }

  void check_sharding() const {
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      std::map<std::int32_t, Position> gathered;
      each_cell_of(rank, [&](Position cell, const Action& action) {
        const bool whole = gathered.contains(action.stage);
        if (action.kind == Kind::unshard) {
          if (whole) problem(cell, "stage {} is gathered already, since cell {}", action.stage, gathered[action.stage].at);
          gathered[action.stage] = cell;
        } else if (action.kind == Kind::reshard) {
          if (!whole) problem(cell, "stage {} is not gathered", action.stage);
          gathered.erase(action.stage);
        } else if (is_step(action.kind) && !whole) {
          problem(cell, "stage {} is not gathered: '{}' must come before", action.stage,
                  to_text({action.stage, Kind::unshard}));
        }
      });
      if (!gathered.empty())
        problem(gathered.begin()->second, "'{}' is missing: the step would end with a gathered stage",
                to_text({gathered.begin()->first, Kind::reshard}));
    }
  }

  void check_reductions() const {
    std::map<std::int32_t, std::pair<std::int32_t, int>> counts;  // per stage: a rank and its number of reductions
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      std::map<std::int32_t, Position> unreduced, reduced;
      std::map<std::int32_t, int> reductions;
      each_cell_of(rank, [&](Position cell, const Action& action) {
        if (ends_activation(action.kind)) {
          if (limits_.reduces_once && reduced.contains(action.stage))
            problem(
                reduced[action.stage],
                "the gradient of '{}', in cell {}, is yet to come, and gradients are kept whole: what was reduced would be "
                "reduced again with it; allowed: one '{}', after the stage's last backward, or sharded gradients",
                to_text(action), cell.at, to_text({action.stage, Kind::reduce}));
          unreduced[action.stage] = cell;
          reductions.try_emplace(action.stage, 0);
        } else if (action.kind == Kind::reduce) {
          if (!unreduced.contains(action.stage)) problem(cell, "stage {} has no gradients to reduce", action.stage);
          unreduced.erase(action.stage);
          reduced[action.stage] = cell;
          ++reductions[action.stage];
        } else if (action.kind == Kind::update) {
          if (unreduced.contains(action.stage))
            problem(cell, "the gradient of '{}' is not reduced: '{}' must come between",
                    to_text(schedule_.at(unreduced[action.stage])), to_text({action.stage, Kind::reduce}));
          reduced.erase(action.stage);
        }
      });
      if (!unreduced.empty())
        problem(unreduced.begin()->second, "its gradient is never reduced: '{}' is missing",
                to_text({unreduced.begin()->first, Kind::reduce}));
      for (const auto& [stage, count] : reductions) {
        const auto [other, added] = counts.try_emplace(stage, rank, count);
        if (added || other->second.second == count) continue;
        Position cell{rank, 0};
        each_cell_of(rank, [&, shared = stage](Position at, const Action& action) {
          if (action.stage == shared) cell = at;
        });
        problem(cell, "rank {} reduces stage {} {} times and rank {} {} times; they share it and must agree", rank, stage,
                count, other->second.first, other->second.second);
      }
    }
  }

  void check_ties() const {
    struct Member {
      Position cell;
      int count = 0;
    };
    std::map<std::int32_t, std::map<std::pair<std::int32_t, std::int32_t>, Member>> groups;  // group, then rank and stage
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      // A rank sums a group once, for all of its stages in it.
      std::map<std::int32_t, std::set<std::int32_t>> groups_of;  // stage: its groups
      each_cell_of(rank, [&](Position, const Action& action) {
        if (action.kind == Kind::tie) groups_of[action.stage].insert(action.microbatch);
      });
      std::map<std::int32_t, Position> summed;  // group: the first of its cells
      std::map<std::int32_t, bool> updated;
      each_cell_of(rank, [&](Position cell, const Action& action) {
        if (action.kind == Kind::tie) {
          if (updated[action.stage] && !limits_.many_updates)
            problem(cell, "it comes after the update of stage {}", action.stage);
          summed.try_emplace(action.microbatch, cell);
          auto& member = groups[action.microbatch][{rank, action.stage}];
          member.cell = cell;
          ++member.count;
        } else if (action.kind == Kind::update) {
          updated[action.stage] = true;
        } else if (ends_activation(action.kind) && !limits_.many_updates) {
          for (const std::int32_t group : groups_of[action.stage])
            if (summed.contains(group))
              problem(cell, "it adds to a gradient that '{}' has summed already", to_text(schedule_.at(summed[group])));
        }
      });
    }
    for (const auto& [group, members] : groups) {
      const Member& first = members.begin()->second;
      if (members.size() < 2) problem(first.cell, "no other stage has a TIE{}", group);
      for (const auto& [who, member] : members) {
        if (member.count != first.count)
          problem(member.cell, "stage {} has {} of TIE{} and stage {} has {}; they must agree", who.second, member.count,
                  group, members.begin()->first.second, first.count);
      }
    }
  }

  // The table's ties are the model's.
  void check_tied_stages() const {
    const auto& tied = *limits_.tied;
    const auto is_of = [&](std::size_t group, std::int32_t stage) {
      return std::find(tied[group].begin(), tied[group].end(), stage) != tied[group].end();
    };
    std::set<std::pair<std::int32_t, std::int32_t>> found;
    each_cell([&](Position cell, const Action& action) {
      if (action.kind != Kind::tie) return;
      const auto group = static_cast<std::size_t>(action.microbatch);
      if (tied.empty()) problem(cell, "no weights of the model are tied over several stages");
      if (group >= tied.size()) problem(cell, "the last group of stages with tied weights is TIE{}", tied.size() - 1);
      if (!is_of(group, action.stage))
        problem(cell, "stage {} has no weights of group {}; the group's stages are {}", action.stage, group,
                fmt::join(tied[group], ", "));
      found.emplace(action.stage, action.microbatch);
    });
    each_cell([&](Position cell, const Action& action) {
      if (action.kind != Kind::update) return;
      for (std::size_t group = 0; group < tied.size(); ++group)
        if (const auto number = static_cast<std::int32_t>(group);
            is_of(group, action.stage) && !found.contains({action.stage, number}))
          problem(cell, "'{}' must come before: stages {} share weights", to_text({action.stage, Kind::tie, number}),
                  fmt::join(tied[group], ", "));
    });
  }

  void check_deadlock(const Index& index) const {
    const Wiring wiring = wire(schedule_, index, Costs());
    const auto cycle = wiring.clock.cycle();
    if (cycle.empty()) return;
    std::vector<Position> cells;
    for (const Task task : cycle) {
      const Position cell = wiring.cell(task);
      if (cells.empty() || !(cells.back() == cell)) cells.push_back(cell);
    }
    // A person reads the order within a rank from the table: of each stretch on one rank its ends are enough.
    std::string chain;
    std::size_t named = 0;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const bool inside =
          i > 0 && i + 1 < cells.size() && cells[i - 1].rank == cells[i].rank && cells[i + 1].rank == cells[i].rank;
      if (i == 0 || inside) continue;
      if (++named > 8) {
        chain += " which waits for …";
        break;
      }
      chain += fmt::format("{} '{}' of rank {}", named == 1 ? "" : ", which waits for", to_text(schedule_.at(cells[i])),
                           cells[i].rank);
    }
    problem(cells.front(), "it waits for{}, which waits for it: a deadlock", chain);
  }

  void check_activations() const {
    if (limits_.activations.empty()) return;
    require(limits_.activations.size() == schedule_.rows.size(), "{} bounds of activations for {} ranks",
            limits_.activations.size(), schedule_.rows.size());
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      const int most = limits_.activations[static_cast<std::size_t>(rank)];
      int live = 0;
      each_cell_of(rank, [&](Position cell, const Action& action) {
        if (action.kind == Kind::forward && contents_.backward && ++live > most)
          problem(cell, "{} activations are live on rank {}; allowed: {}", live, rank, most);
        if (ends_activation(action.kind)) --live;
      });
    }
  }

  const Schedule& schedule_;
  const Limits& limits_;
  const Contents contents_;
};

}  // namespace

std::optional<Problem> find_problem(const Schedule& schedule, const Limits& limits) {
  try {
    Checker(schedule, limits).check();
  } catch (Problem& problem) {
    return std::move(problem);
  }
  return std::nullopt;
}

void validate(const Schedule& schedule, const std::string& name, const Limits& limits) {
  const auto problem = find_problem(schedule, limits);
  if (!problem) return;
  throw ScheduleError(fmt::format("schedule {}: {}", name, problem->message),
                      problem->cell ? marked_table(schedule, problem->cell) : std::string());
}

}  // namespace bonfire::schedule
