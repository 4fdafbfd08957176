#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/stateful.h"

namespace bonfire {

struct GradScalerOptions {
  double scale = 65536;
  double growth = 2;  // after this many good steps in a row the scale grows by this factor,
  std::int64_t growth_interval = 2000;
  double backoff = 0.5;  // and after a bad one it shrinks by this
};

// Keeps small fp16 gradients from vanishing: the loss is multiplied by a scale before backward, and the optimizer divides
// the gradients by it. A step whose gradients overflowed is skipped and makes the scale smaller. Every rank sees the same
// gradients, so every rank decides alike.
class BONFIRE_API GradScaler : public Stateful {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss) const;
  double scale() const { return scale_; }
  std::int64_t skipped() const { return skipped_; }

  // For the optimizer: whether the gradients of this step were finite.
  void update(bool finite);

  State save() const override;
  void load(const State& state) override;

 private:
  GradScalerOptions options_;
  double scale_;
  std::int64_t good_ = 0, skipped_ = 0;
};

}  // namespace bonfire
