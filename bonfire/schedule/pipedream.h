#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/schedule.h"

// PipeDream's schedules (1F1B-RR): a stage may be on several ranks, its replicas, which take minibatches in turn; stages are
// updated while others compute with weights from before. docs/pipedream.md derives what is counted here.
namespace bonfire::schedule {

// Which weights a minibatch sees.
enum class WeightMode {
  stashing,     // pipedream: on every stage the newest that there are when its forward comes
  vertical,     // pipedream-vertical: on all stages those that the first stage had then
  two_buffers,  // pipedream-2bw: those from before the last update, on all stages
  flush,        // pipedream-flush: the newest; the pipeline runs empty before every update
};
BONFIRE_API std::string_view name_of(WeightMode mode);
BONFIRE_API std::optional<WeightMode> weight_mode(std::string_view schedule);
BONFIRE_API const std::vector<std::string>& pipedream_names();

// Ranks are numbered by stage: those of the first stage come first.
struct RoundRobin {
  std::vector<int> replicas{1};  // of each stage
  WeightMode mode = WeightMode::stashing;
  int minibatches = 1;
  // Of a minibatch. With stashing and vertical synchronisation all of them are on one replica of a stage; otherwise replicas
  // take them in turn.
  int microbatches = 1;

  BONFIRE_API int ranks() const;
  BONFIRE_API int first_rank(int stage) const;
  BONFIRE_API int rank_of(int stage, int microbatch) const;
  // After so many minibatches every stage has had whole rounds: a pipeline can drain there.
  BONFIRE_API int round() const;
};

// With stashing and vertical synchronisation: minibatches on each replica of a stage whose backward has not ended, where the
// pipeline is full. Otherwise microbatches.
BONFIRE_API int in_flight(const RoundRobin& robin, int stage);

// The computations and updates of so many minibatches, from an empty pipeline to an empty pipeline. Throws ConfigError where
// there is no such table, saying what is allowed.
BONFIRE_API Schedule pipedream(const RoundRobin& robin);

// The weights that each cell of a table has to do with: follows from the table and the mode alone.
struct Versions {
  // By rank and cell: of a forward and a backward the version that they use, of an update the one that it makes, otherwise
  // -1. A stage's first version is 0.
  std::vector<std::vector<int>> of;
  // By rank: how many versions of its stage are needed at once.
  std::vector<int> held;
};
// Throws ScheduleError, `name` in its message, where a forward needs a version that its stage does not have yet.
// REQUIRES: the table is valid, and each rank has one stage.
BONFIRE_API Versions versions_of(const Schedule& table, WeightMode mode, const std::string& name);

// How many updates have changed a stage since the weights that a gradient was made with: by rank, of each update the most
// that any backward in it has.
BONFIRE_API std::vector<std::vector<int>> staleness_of(const Schedule& table, const Versions& versions);

// The least minibatch, of microbatches, with which the schedule exists, and enough minibatches to fill the pipeline, run a
// round and drain.
BONFIRE_API RoundRobin endless_shape(RoundRobin robin);

// The same as formulas: the version that a microbatch uses on a stage, and the update that its gradient goes into, both
// counted from 0 where the pipeline was empty.
BONFIRE_API int version_of(const RoundRobin& robin, int stage, int microbatch);
BONFIRE_API int update_of(const RoundRobin& robin, int stage, int microbatch);

// Versions of a stage that vertical synchronisation needs at once in a full pipeline.
struct VerticalStage {
  int ranks = 1;  // of all stages
  int first = 1;  // replicas of the first stage
  int own = 1;    // replicas of this one
};
BONFIRE_API int vertical_versions(const VerticalStage& stage);

// Versions of a stage that a full pipeline needs at once.
BONFIRE_API int most_versions(const RoundRobin& robin, int stage);

// A table for any number of minibatches: the prologue, the period any number of times, the epilogue. Cells of the period are
// numbered as the first time that it comes, those of the epilogue as if it came once.
struct Endless {
  Schedule prologue, period, epilogue;
  int microbatches = 0;       // of a period
  int least_minibatches = 0;  // of the table in which the period comes once
  int period_minibatches = 0;
};
// With what an executor needs (lowering.h). `robin.minibatches` does not count.
BONFIRE_API Endless endless(RoundRobin robin, const LowerOptions& options);
BONFIRE_API Schedule unrolled(const Endless& table, int periods);
// So many periods, of which the first ones are left out, and with them the prologue.
struct Periods {
  int count = 1;
  int skipped = 0;
};
BONFIRE_API std::vector<Action> unrolled_row(const Endless& table, int rank, Periods periods);

}  // namespace bonfire::schedule
