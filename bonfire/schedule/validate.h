#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire::schedule {

struct Limits {
  std::vector<int> activations;  // per rank: how many may be live at once; empty: no bound
  bool many_updates = false;     // a stage may be updated more than once, or before all of its backwards
  // Every rank has whole gradients and averages only a part of them: a reduction must be the last of its stage.
  bool reduces_once = false;
  bool one_rank_per_stage = false;  // nobody keeps copies of a stage on several ranks of the table equal
  // The stages of each group of tied weights, by the number of its TIE. Nothing: whatever the table says.
  std::optional<std::vector<std::vector<int>>> tied{};
};

struct Problem {
  Position cell;        // the one to look at
  std::string message;  // one line, with that cell and its place
};

// The first thing that is wrong with a table; nothing where it can run. It can when
//   - every microbatch goes forward through every stage once, and back once, on the rank that kept its activation;
//   - nothing is computed before what it needs, each stage is updated once and after its gradients are complete;
//   - every message has its send and its receive, in the same order on both sides of each direction of each pair;
//   - a sharded stage is gathered when it computes and let go of afterwards; all gradients are reduced before an update;
//     ranks that share a stage or tied weights issue the same collectives;
//   - no cells wait for each other, under the rules of wiring.h;
//   - no rank keeps more activations than it may.
// Messages, sharding, reductions, ties and updates are checked where the table has any of their sort.
BONFIRE_API std::optional<Problem> find_problem(const Schedule& schedule, const Limits& limits = {});

// A table that cannot run. what() is one line; table() is the table around the bad cell, with it in brackets.
class BONFIRE_API ScheduleError : public ConfigError {
 public:
  ScheduleError(const std::string& message, std::string table) : ConfigError(message), table_(std::move(table)) {}
  const std::string& table() const { return table_; }

 private:
  std::string table_;
};

// Throws ScheduleError where there is a problem. `name` says which schedule it is.
BONFIRE_API void validate(const Schedule& schedule, const std::string& name, const Limits& limits = {});

}  // namespace bonfire::schedule
