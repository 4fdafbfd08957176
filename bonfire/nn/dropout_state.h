#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "bonfire/base/random.h"
#include "bonfire/kernels/dropout.h"

namespace bonfire {

// Where in the run a forward is, shared by all dropout of a model. What is dropped is a function of the seed, the step, the
// place in the model and the number of the sample in the whole batch: not of the ranks, the microbatches or the order of
// work. Recomputation copies the state at forward and puts it back while it repeats that forward.
struct DropoutState {
  Random seed{0};
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  // number of the microbatch's first sample in the batch of all ranks
  bool training = true;
};

// One place where a model drops activations.
class Dropout {
 public:
  Dropout() = default;
  // `place` names the Unit and the region in it. Nothing is dropped without a state.
  Dropout(double p, std::shared_ptr<DropoutState> state, std::string_view place)
      : p_(p), state_(std::move(state)), place_(Random(0).fork(place).key()) {}

  bool active() const { return p_ > 0 && state_ && state_->training; }

  // The first dimension of x is the sample.
  at::Tensor operator()(const at::Tensor& x) const {
    if (!active()) return x;
    const std::int64_t per_sample = x.size(0) ? x.numel() / x.size(0) : 0;
    return dropout(
        x, {.p = p_, .random = state_->seed.fork(place_).fork(state_->step), .first = state_->first_sample * per_sample});
  }

 private:
  double p_ = 0;
  std::shared_ptr<DropoutState> state_;
  std::uint64_t place_ = 0;
};

}  // namespace bonfire
