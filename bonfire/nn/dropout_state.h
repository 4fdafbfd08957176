#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/kernels/dropout.h"
#include "bonfire/nn/sequence_places.h"

namespace bonfire {

// Where in the run a forward is, and what its samples are, shared by all layers of a model that ask for it. What is dropped
// is a function of the seed, the step, the place in the model and the number of the sample in the whole batch: not of the
// ranks, the microbatches or the order of work.
struct DropoutState {
  Random seed{0};
  std::uint64_t step = 0;
  std::int64_t first_sample = 0;  // number of the microbatch's first sample in the batch of all ranks
  bool training = true;
  ContextPart context{};  // the positions of the samples that this rank has
  std::shared_ptr<const Documents> documents = std::make_shared<Documents>();
};

// The calling thread's forward depends on it: where that runs again (recompute.h), it gets what this is now.
BONFIRE_API void repeat_with(const std::shared_ptr<DropoutState>& state);

// Those of the forward that runs now.
inline std::shared_ptr<const Documents> documents_of(const std::shared_ptr<DropoutState>& state) {
  if (!state) return std::make_shared<Documents>();
  repeat_with(state);
  return state->documents;
}

// One place where a model drops activations.
class BONFIRE_API Dropout {
 public:
  Dropout() = default;
  // `place` names the Unit and the region in it. Nothing is dropped without a state.
  Dropout(double p, std::shared_ptr<DropoutState> state, std::string_view place)
      : p_(p), state_(std::move(state)), place_(Random(0).fork(place).key()) {}

  bool active() const {
    if (p_ <= 0 || !state_) return false;
    repeat_with(state_);
    return state_->training;
  }

  // The first dimension of x is the sample.
  at::Tensor operator()(const at::Tensor& x) const {
    if (!active()) return x;
    return state_->context.ranks > 1 ? of_part(x, 0, x.size(1)) : dropout(x, options(x));
  }

  // What a kernel that drops elements of x itself is told. REQUIRES: this rank has all positions.
  DropoutOptions options(const at::Tensor& x) const {
    if (!active()) return {};
    require(state_->context.ranks == 1, "dropout inside of a kernel, of part {} of {} of the positions",
            state_->context.rank, state_->context.ranks);
    const std::int64_t per_sample = x.size(0) ? x.numel() / x.size(0) : 0;
    return {.p = p_, .random = state_->seed.fork(place_).fork(state_->step), .first = state_->first_sample * per_sample};
  }

  // The same of positions [begin, begin + x.size(1)) of the `positions` that this rank has of every sample: a part of the
  // batch drops what the batch drops.
  at::Tensor of_part(const at::Tensor& x, std::int64_t begin, std::int64_t positions) const;

 private:
  double p_ = 0;
  std::shared_ptr<DropoutState> state_;
  std::uint64_t place_ = 0;
};

}  // namespace bonfire
