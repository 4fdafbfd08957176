#include "bonfire/kernels/sum_of_squares.h"

#include <algorithm>
#include <vector>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::load;

template <class T>
BONFIRE_INLINE double squares_loop(const T* __restrict x, std::int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<double>(load(x[i]));
    sum += value * value;
  }
  return sum;
}

BONFIRE_CLONES double squares_rows(const float* x, std::int64_t n) { return squares_loop(x, n); }
BONFIRE_CLONES double squares_rows(const double* x, std::int64_t n) { return squares_loop(x, n); }
BONFIRE_CLONES double squares_rows(const c10::BFloat16* x, std::int64_t n) { return squares_loop(x, n); }
BONFIRE_CLONES double squares_rows(const c10::Half* x, std::int64_t n) { return squares_loop(x, n); }

double squares_of(const Tensor& given) {
  const Tensor x = given.contiguous();
  constexpr std::int64_t block = 16384;
  const std::int64_t n = x.numel(), blocks = (n + block - 1) / block;
  std::vector<double> sums(static_cast<std::size_t>(blocks));
  cpu::dispatch_floating(x.scalar_type(), "sum_of_squares", [&](auto t) {
    const auto* data = x.const_data_ptr<decltype(t)>();
    at::parallel_for(0, blocks, 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        sums[static_cast<std::size_t>(i)] = squares_rows(data + i * block, std::min(block, n - i * block));
    });
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

Tensor sum_of_squares_cpu(at::TensorList tensors) {
  double total = 0;
  for (const Tensor& tensor : tensors) total += squares_of(tensor);
  return at::scalar_tensor(total, at::kDouble);
}

Tensor sum_of_squares_composite(at::TensorList tensors) {
  Tensor sum;
  for (const Tensor& x : tensors) {
    const Tensor squares = at::linalg_vector_norm(x, 2, {}, false, at::kDouble).square_();
    sum = sum.defined() ? sum.add_(squares) : squares;
  }
  return sum;
}

}  // namespace

Tensor sum_of_squares(at::TensorList tensors) {
  return BONFIRE_OPERATOR("bonfire::sum_of_squares", Tensor(at::TensorList)).call(tensors);
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) { m.impl("sum_of_squares", sum_of_squares_cpu); }
TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) { m.impl("sum_of_squares", sum_of_squares_composite); }

}  // namespace bonfire
