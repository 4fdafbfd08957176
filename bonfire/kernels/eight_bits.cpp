#include "bonfire/kernels/eight_bits.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>

#include "bonfire/kernels/agreed_math.h"

namespace bonfire {
namespace {

using at::Tensor;

double largest(bool wide_range) { return wide_range ? largest_in_eight_bits<true> : largest_in_eight_bits<false>; }

Tensor magnitudes(const Tensor& x) { return x.abs().masked_fill_(at::isfinite(x).logical_not_(), 0); }

}  // namespace

Tensor largest_magnitude(const Tensor& x) { return magnitudes(x).amax().to(at::kFloat).reshape({1}); }
Tensor largest_magnitudes_of_rows(const Tensor& x) { return magnitudes(x).amax(1).to(at::kFloat); }

Tensor scale_for(const Tensor& magnitude, bool wide_range) {
  // scale_to_eight_bits() of each, where the magnitudes are: asking the device for them would wait for it, and end a
  // capture.
  return at::full_like(magnitude, largest(wide_range))
      .div_(magnitude)
      .clamp_max_(most_scale)
      .masked_fill_(magnitude.gt(0).logical_not_(), 1.0);
}

Tensor in_eight_bits(const Tensor& x, const Tensor& scale, bool wide_range) {
  const double most = largest(wide_range);
  const Tensor wide = x.to(at::kFloat), zero_or_nan = wide.sub(wide);
  return wide.mul(scale).clamp_(-most, most).add_(zero_or_nan).to(wide_range ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
}

}  // namespace bonfire
