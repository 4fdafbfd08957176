#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/comm/captured_work.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/comm/world.h"
#include "bonfire/models/precision.h"
#include "bonfire/train/config.h"
#include "bonfire/train/trainee.h"

namespace bonfire {

class WholeModel;

// Whole steps of one shape on a GPU: after some that were taken in parts, forward, backward, reductions, gathers, norm and
// update are captured once and replayed from then on. The host only brings inputs and the numbers that differ from step to
// step, and may begin a step before it has read what the last one came to.
class StepGraph {
 public:
  StepGraph(const World& world, const Mesh& mesh, const Config& config);
  ~StepGraph();

  // Nothing where this step must be taken in parts. Collective.
  std::shared_ptr<StepReading> step(WholeModel& model, const std::vector<Batch>& microbatches, const Trainee::Pass& pass,
                                    const StepOptions& options);
  // The host knows what all steps have come to.
  void settle();

 private:
  class Reading;
  bool capture(WholeModel& model, const Trainee::Pass& pass, const StepOptions& options);
  void issue(WholeModel& model, const Trainee::Pass& pass, const StepOptions& options);

  World world_;
  Mesh mesh_;
  bool must_;  // train.graphs = "on"
  bool given_up_ = false;
  std::int64_t in_parts_ = 0;  // steps of this shape, one after the other
  std::vector<Batch> inputs_;  // where captured work finds them
  at::Tensor result_;          // and where it leaves own loss, sum of all ranks' losses, and norm
  std::unique_ptr<CapturedWork> work_;
  std::unique_ptr<CapturedCalls> calls_;
  std::vector<CapturedCollective> collectives_;
  std::deque<std::shared_ptr<Reading>> unread_;  // at most two, oldest first
  const char* place_ = "";                       // in the step, for errors
};

}  // namespace bonfire
