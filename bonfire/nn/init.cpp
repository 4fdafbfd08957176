#include "bonfire/nn/init.h"

#include <cmath>
#include <numbers>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace bonfire::nn {
namespace {

// Elements [begin, end) of the sequence random.normal(0), random.normal(1), ...: both values of a block at once.
template <class T>
void draw(T* out, const Random& random, double deviation, std::int64_t begin, std::int64_t end) {
  for (std::int64_t pair = begin / 2; 2 * pair < end; ++pair) {
    const auto words = random.block(static_cast<std::uint64_t>(pair));
    const double radius = deviation * std::sqrt(-2 * std::log((words[0] + 1.0) * 0x1p-32));
    const double angle = 2 * std::numbers::pi * (words[1] * 0x1p-32);
    if (2 * pair >= begin) out[2 * pair] = static_cast<T>(radius * std::cos(angle));
    if (2 * pair + 1 < end) out[2 * pair + 1] = static_cast<T>(radius * std::sin(angle));
  }
}

template <class T>
void draw_all(T* out, std::int64_t n, const Random& random, double deviation) {
  at::parallel_for(0, n, 4096, [&](std::int64_t begin, std::int64_t end) { draw(out, random, deviation, begin, end); });
}

}  // namespace

void fill_normal(const at::Tensor& tensor, const Random& random, double deviation) {
  at::NoGradGuard no_grad;
  const std::int64_t n = tensor.numel();
  const bool direct = tensor.is_cpu() && tensor.is_contiguous();
  if (direct && tensor.scalar_type() == at::kFloat) return draw_all(tensor.data_ptr<float>(), n, random, deviation);
  if (direct && tensor.scalar_type() == at::kDouble) return draw_all(tensor.data_ptr<double>(), n, random, deviation);
  const at::Tensor drawn = at::empty(tensor.sizes(), at::kDouble);
  draw_all(drawn.data_ptr<double>(), n, random, deviation);
  tensor.copy_(drawn);
}

}  // namespace bonfire::nn
