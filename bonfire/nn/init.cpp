#include "bonfire/nn/init.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace bonfire::nn {
namespace {

// Elements [begin, end) of the sequence random.normal(0), random.normal(1), ...: both values of a block at once. `out` is
// the place of element `first`.
template <class T>
void draw(T* out, std::int64_t first, const Random& random, double deviation, std::int64_t begin, std::int64_t end) {
  for (std::int64_t pair = begin / 2; 2 * pair < end; ++pair) {
    const auto words = random.block(static_cast<std::uint64_t>(pair));
    const double radius = deviation * std::sqrt(-2 * std::log((words[0] + 1.0) * 0x1p-32));
    const double angle = 2 * std::numbers::pi * (words[1] * 0x1p-32);
    if (2 * pair >= begin) out[2 * pair - first] = static_cast<T>(radius * std::cos(angle));
    if (2 * pair + 1 < end) out[2 * pair + 1 - first] = static_cast<T>(radius * std::sin(angle));
  }
}

template <class T>
void draw_all(T* out, std::int64_t first, std::int64_t count, const Random& random, double deviation) {
  at::parallel_for(first, first + count, 4096,
                   [&](std::int64_t begin, std::int64_t end) { draw(out, first, random, deviation, begin, end); });
}

constexpr std::int64_t kDrawnAtOnce = 1 << 17;  // 1 MiB of doubles

}  // namespace

void fill_normal(const at::Tensor& tensor, const Random& random, double deviation) {
  at::NoGradGuard no_grad;
  const std::int64_t n = tensor.numel();
  const bool direct = tensor.is_cpu() && tensor.is_contiguous();
  if (direct && tensor.scalar_type() == at::kFloat) return draw_all(tensor.data_ptr<float>(), 0, n, random, deviation);
  if (direct && tensor.scalar_type() == at::kDouble) return draw_all(tensor.data_ptr<double>(), 0, n, random, deviation);
  if (n == 0) return;
  // Some rows at a time: all of them in doubles would be twice or four times what they are for.
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0), row = n / rows;
  const at::Tensor flat = tensor.dim() == 0 ? tensor.view({1}) : tensor;
  const std::int64_t most = std::max<std::int64_t>(1, kDrawnAtOnce / row);
  const at::Tensor drawn = at::empty({std::min(most, rows) * row}, at::kDouble);
  for (std::int64_t first = 0; first < rows; first += most) {
    const at::Tensor part = flat.narrow(0, first, std::min(most, rows - first));
    draw_all(drawn.data_ptr<double>(), first * row, part.numel(), random, deviation);
    part.copy_(drawn.narrow(0, 0, part.numel()).view(part.sizes()));
  }
}

void fill_normal(const at::Tensor& tensor, const PartOfTensor& part, const Random& random, double deviation) {
  at::NoGradGuard no_grad;
  const at::Tensor rows = tensor.dim() == 1 ? tensor.unsqueeze(1) : tensor;
  const at::Tensor drawn = at::empty({rows.size(1)}, at::kDouble);
  for (std::int64_t at = 0; at < rows.size(0); ++at) {
    const std::int64_t first = (part.begin[0] + at) * part.row + part.begin[1];
    draw_all(drawn.data_ptr<double>(), first, drawn.numel(), random, deviation);
    rows[at].copy_(drawn);
  }
}

}  // namespace bonfire::nn
