#pragma once

#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/step_events.h"

// How long a step takes: its events on a clock with one stream of computation and one of communication.
namespace bonfire::plan {

struct UnitCost {
  double forward = 0;  // seconds
  double backward = 0;
};

struct FlatCost {
  double gather = 0;
  double gather_again = 0;  // in backward, where that is among fewer ranks; 0: as in forward
  double reduce = 0;        // over the shard group
  double across = 0;        // over the replicas
  double refresh = 0;       // sending what an update has changed
};

// As measured, or as told by a link.
struct StepCosts {
  std::vector<UnitCost> units;  // in forward order
  std::vector<FlatCost> flats;  // in the order of flats_of
  double scalar = 0;            // one all-reduce of a number: the loss, the norm
  double update = 0;            // the optimizer's
};

// What of a forward's time backward makes again: 1 for all of it; in part, its share of the products.
BONFIRE_API double part_made_again(const ModelDescription& model, const UnitDescription& unit);
// The same where backward makes parts of forwards again. REQUIRES: costs without recomputation, of the model's Units.
BONFIRE_API StepCosts recomputing(StepCosts costs, const ModelDescription& model);

// Between ranks that split layers, and between those that share samples.
struct ExchangeLinks {
  Link tensor{}, context{};
};
// The same where Units exchange activations while they run, one after the other and beside nothing else: what products hide
// of that is left out. REQUIRES: costs of the model's Units without it.
BONFIRE_API StepCosts exchanging(StepCosts costs, const ModelDescription& model, const DataParallel& layout,
                                 const ExchangeLinks& links);

// How the host and the streams go together.
enum class Host {
  computes,    // the host computes: it issues what comes next when a Unit has run. A CPU
  runs_ahead,  // the host only issues: a gather waits for the last use of the memory it fills. A GPU
};

struct Span {
  Act act;
  std::size_t index;  // as in Event
  int microbatch;
  double start, end;
};

struct StepTime {
  double seconds = 0;         // of the step
  double compute = 0;         // Units and update
  double communication = 0;   // all collectives, one after the other
  std::vector<Span> spans{};  // gathers, forwards, backwards and reductions, in the order in which they are issued

  double exposed() const { return seconds - compute; }  // time in which only communication goes on, or nothing
};

// REQUIRES: as many costs as there are Units and buffers.
BONFIRE_API StepTime time_of_step(const std::vector<StepUnit>& units, const DataParallel& layout, const StepCosts& costs,
                                  Host host = Host::computes);

}  // namespace bonfire::plan
