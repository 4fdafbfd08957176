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

// Whole steps on a GPU, which decides by itself whether a step changes anything: forward, backward, reductions, gathers,
// norm and update are issued at once, and the host may begin a step before it has read what the last one came to. Where
// graphs are wanted, steps of one shape are captured after some, and replayed from then on: then the host only brings inputs
// and the numbers that differ from step to step.
class DeviceSteps {
 public:
  DeviceSteps(const World& world, const Mesh& mesh, const Config& config);
  ~DeviceSteps();

  // Nothing where this step must be taken in parts: the first. Collective.
  std::shared_ptr<StepReading> step(WholeModel& model, const std::vector<Batch>& microbatches,
                                    const Trainee::StepContext& context, const StepOptions& options);
  // The host knows what all steps have come to.
  void settle();

 private:
  class Reading;
  // Makes ready for another step of these shapes, and captures it where that is due.
  void approach_capture(WholeModel& model, const std::vector<Batch>& microbatches, const Trainee::StepContext& context,
                        const StepOptions& options);
  void capture(WholeModel& model, const Trainee::StepContext& context, const StepOptions& options);
  void issue(WholeModel& model, const std::vector<Batch>& microbatches, const Trainee::StepContext& context,
             const StepOptions& options);

  World world_;
  Mesh mesh_;
  bool captures_;  // train.graphs is not "off", and nothing stands in the way
  bool must_;      // train.graphs = "on"
  bool begun_ = false;
  std::int64_t issued_ = 0;    // steps of this shape, one after the other
  std::vector<Batch> inputs_;  // where captured work finds them
  at::Tensor result_;          // where a step leaves own loss, sum of all ranks' losses, and norm
  std::unique_ptr<CapturedWork> work_;
  std::unique_ptr<CapturedCalls> calls_;
  std::vector<CapturedCollective> collectives_;
  std::deque<std::shared_ptr<Reading>> unread_;  // at most two, oldest first
  const char* place_ = "";                       // in the step, for errors
};

}  // namespace bonfire
