#include "bonfire/cuda/norm.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"
#include "bonfire/cuda/norm_types.cuh"

namespace bonfire::cuda {
namespace {

// Threads that share a row are blockDim.x, whole warps of them. One warp needs no shared memory, and then blockDim.y rows
// share a block. Every call has shared memory of its own.
template <class C>
__device__ C sum_of_row(C value, C* shared) {
  value = sum_of_warp(value);
  if (blockDim.x == 32) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  C sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += shared[warp];
  return sum;
}

template <class T, class W>
struct Forward {
  const T *x, *residual;
  const W *weight, *bias;
  T *sum, *normed;
  compute_t<T>*mean, *rstd;
  std::int64_t rows, columns;
  compute_t<T> eps;
};

// `kept` packs of a row stay in a thread's registers; 0 reads them again for every pass, for rows of any length.
template <class T, class W, int width, int kept, bool centered>
__global__ void __launch_bounds__(most_threads) forward_kernel(Forward<T, W> a) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  __shared__ C shared[2][most_threads / 32];
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  const std::int64_t packs = a.columns / width;
  const T* x = a.x + row * a.columns;
  Pack<T, width> own[kept > 0 ? kept : 1];
  const auto each = [&](const auto& body) {
    if constexpr (kept > 0) {
#pragma unroll
      for (int p = 0; p < kept; ++p) {
        const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(p) * blockDim.x;
        if (i < packs) body(i, own[p]);
      }
    } else {
      for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
        own[0] = pack_at<T, width>(x, i);
        body(i, own[0]);
      }
    }
  };
  if constexpr (kept > 0) each([&](std::int64_t i, Pack<T, width>& v) { v = read_once<T, width>(x, i); });
  if (a.residual) {
    T* sum = a.sum + row * a.columns;
    each([&](std::int64_t i, Pack<T, width>& v) {
      const Pack<T, width> other = read_once<T, width>(a.residual + row * a.columns, i);
      Pack<T, width> both;
#pragma unroll
      for (int j = 0; j < width; ++j) both.at[j] = store<T>(element(v, j) + element(other, j));
      pack_at<T, width>(sum, i) = v = both;
    });
    x = sum;  // of which every thread reads what it wrote
  }
  const C n = static_cast<C>(a.columns);
  C mean = 0;
  if constexpr (centered) {
    each([&](std::int64_t, const Pack<T, width>& v) {
#pragma unroll
      for (int j = 0; j < width; ++j) mean += element(v, j);
    });
    mean = sum_of_row(mean, shared[0]) / n;
  }
  C squares = 0;
  each([&](std::int64_t, const Pack<T, width>& v) {
#pragma unroll
    for (int j = 0; j < width; ++j) squares += (element(v, j) - mean) * (element(v, j) - mean);
  });
  const C rstd = C(1) / sqrt(sum_of_row(squares, shared[1]) / n + a.eps);
  if (threadIdx.x == 0) {
    a.rstd[row] = rstd;
    if constexpr (centered) a.mean[row] = mean;
  }
  if constexpr (kept > 0) each([](std::int64_t, Pack<T, width>& v) { stay_packed(v); });
  each([&](std::int64_t i, const Pack<T, width>& v) {
    const Pack<W, width> weight = pack_at<W, width>(a.weight, i);
    Pack<W, width> bias{};
    if constexpr (centered) bias = pack_at<W, width>(a.bias, i);
    Pack<T, width> out;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      C y = (element(v, j) - mean) * rstd * element(weight, j);
      if constexpr (centered) y += element(bias, j);
      out.at[j] = store<T>(y);
    }
    write_once<T, width>(a.normed + row * a.columns, i, out);
  });
}

}  // namespace

void launch_norm(const NormShape& shape, const NormForward& memory, cudaStream_t stream) {
  if (shape.rows == 0) return;
  with_types(shape, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    using C = compute_t<T>;
    const Forward<T, W> a{static_cast<const T*>(memory.x),
                          static_cast<const T*>(memory.residual),
                          static_cast<const W*>(memory.weight),
                          static_cast<const W*>(memory.bias),
                          static_cast<T*>(memory.sum),
                          static_cast<T*>(memory.normed),
                          static_cast<C*>(memory.mean),
                          static_cast<C*>(memory.rstd),
                          shape.rows,
                          shape.columns,
                          static_cast<C>(memory.eps)};
    constexpr int wide = full_width<T>;
    const std::int64_t packs = shape.columns / wide;
    const bool packed = shape.columns % wide == 0 && aligned({memory.x, memory.residual, memory.sum, memory.normed}, 16) &&
                        aligned({memory.weight, memory.bias}, sizeof(W) * wide);
    with_centered(shape.centered, [&](auto centered) {
      const auto run = [&](auto width, auto kept, int threads) {
        const int rows = threads == 32 ? 4 : 1;
        launch(forward_kernel<T, W, decltype(width)::value, decltype(kept)::value, decltype(centered)::value>,
               {static_cast<unsigned>((shape.rows + rows - 1) / rows), dim3(threads, rows)}, stream, a);
      };
      if (!packed || packs > 8 * most_threads)
        run(Number<1>{}, Number<0>{}, shape.columns > 1024 ? 256 : 32);
      else if (packs <= 4 * 32)
        run(Number<wide>{}, Number<4>{}, 32);
      else if (packs <= 2 * most_threads)
        run(Number<wide>{}, Number<2>{}, static_cast<int>((packs + 2 * 32 - 1) / (2 * 32) * 32));
      else
        run(Number<wide>{}, Number<8>{}, static_cast<int>((packs + 8 * 32 - 1) / (8 * 32) * 32));
    });
  });
}

}  // namespace bonfire::cuda
