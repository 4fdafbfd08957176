#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/flat_parameter.h"

namespace bonfire {

// What became of a step's gradients.
struct GradientUse {
  bool applied = true;  // false: they were not finite, and the step was dropped
  double rescaled = 1;  // the next step's gradients are multiplied by this many times what these were (a gradient scaler)
};

// How the gradient of this rank's shares of a flat parameter becomes their average over the replicas: the communication
// hook. The engine calls the three in this order, each for one bucket after the other, in an order that is the same on all
// ranks.
class BONFIRE_API Reduction {
 public:
  virtual ~Reduction() = default;

  // Stream: while backward still runs. Must not wait for other ranks. `bucket` numbers the flat parameter.
  virtual void begin(std::size_t bucket, FlatParameter& flat) = 0;
  // When backward has ended: a second exchange, for those that need one.
  virtual void advance(std::size_t bucket, FlatParameter& flat) {}
  // The gradient is the average when this returns (GPU: on the current stream).
  virtual void end(std::size_t bucket, FlatParameter& flat) = 0;
  // The step is over. Whoever carries something from one step to the next hears here what to do with it.
  virtual void spent(const GradientUse& use) {}
  // What is carried from one step to the next, of the parameter of a segment; the same names, in the same order, on all
  // ranks. Checkpoints keep it. Values are read, and written, between steps.
  struct Carried {
    std::size_t segment = 0;
    std::string name;
    at::Tensor values{};
    bool of_each_rank = false;  // each rank has values of its own, which add up; otherwise all have the same
  };
  virtual std::vector<Carried> carried(std::size_t bucket, const FlatParameter& flat) { return {}; }
  // The buckets were made anew; what is remembered by bucket is void.
  virtual void reset() {}
};

struct ReductionOptions {
  plan::Compression compression = plan::Compression::none;
  int powersgd_rank = 4;
};

BONFIRE_API std::shared_ptr<Reduction> make_reduction(const Group& replicas, const ReductionOptions& options);

}  // namespace bonfire
