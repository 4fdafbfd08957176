#include "bonfire/cuda/norm.h"

#include <cuda_pipeline.h>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/parts.cuh"

namespace bonfire::cuda {
namespace {

constexpr int most_threads = 512;  // of a block: leaves 128 registers for each

// Threads that share a row are blockDim.x, whole warps of them. One warp needs no shared memory, and then blockDim.y rows
// share a block.
template <class C>
__device__ C sum_of_row(C value, C* shared) {
  value = sum_of_warp(value);
  if (blockDim.x == 32) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  C sum = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += shared[warp];
  __syncthreads();
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
  using C = compute_t<T>;
  __shared__ C shared[32];
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
  if constexpr (kept > 0) each([&](std::int64_t i, Pack<T, width>& v) { v = pack_at<T, width>(x, i); });
  if (a.residual) {
    T* sum = a.sum + row * a.columns;
    each([&](std::int64_t i, Pack<T, width>& v) {
      const Pack<T, width> other = pack_at<T, width>(a.residual + row * a.columns, i);
#pragma unroll
      for (int j = 0; j < width; ++j) v.at[j] = store<T>(load(v.at[j]) + load(other.at[j]));
      pack_at<T, width>(sum, i) = v;
    });
    x = sum;  // of which every thread reads what it wrote
  }
  const C n = static_cast<C>(a.columns);
  C mean = 0;
  if constexpr (centered) {
    each([&](std::int64_t, const Pack<T, width>& v) {
#pragma unroll
      for (int j = 0; j < width; ++j) mean += load(v.at[j]);
    });
    mean = sum_of_row(mean, shared) / n;
  }
  C squares = 0;
  each([&](std::int64_t, const Pack<T, width>& v) {
#pragma unroll
    for (int j = 0; j < width; ++j) squares += (load(v.at[j]) - mean) * (load(v.at[j]) - mean);
  });
  const C rstd = C(1) / sqrt(sum_of_row(squares, shared) / n + a.eps);
  if (threadIdx.x == 0) {
    a.rstd[row] = rstd;
    if constexpr (centered) a.mean[row] = mean;
  }
  each([&](std::int64_t i, const Pack<T, width>& v) {
    const Pack<W, width> weight = pack_at<W, width>(a.weight, i);
    Pack<W, width> bias{};
    if constexpr (centered) bias = pack_at<W, width>(a.bias, i);
    Pack<T, width> out;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      C y = (load(v.at[j]) - mean) * rstd * load(weight.at[j]);
      if constexpr (centered) y += load(bias.at[j]);
      out.at[j] = store<T>(y);
    }
    pack_at<T, width>(a.normed + row * a.columns, i) = out;
  });
}

template <class T, class W>
struct Backward {
  const T *dy, *ds, *x;
  const W *weight, *bias;
  const compute_t<T>*mean, *rstd;
  T *dx, *normed;
  compute_t<T>*d_weight, *d_bias;  // parts: one row for each block
  std::int64_t rows, columns;
};

template <class C>
struct Two {
  C first, second;
};

// Two sums over the block at once, with one barrier: callers alternate between two shared buffers, so that nobody writes
// into one that is still read.
template <class C>
__device__ Two<C> sums_of_block(Two<C> value, Two<C> (&shared)[most_threads / 32]) {
  value = {sum_of_warp(value.first), sum_of_warp(value.second)};
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  Two<C> sum{0, 0};
  for (int warp = 0; warp < blockDim.x / 32; ++warp)
    sum = {sum.first + shared[warp].first, sum.second + shared[warp].second};
  return sum;
}

// Rows that are on their way to shared memory while a row is worked on.
constexpr int stages = 2;
constexpr int most_ahead = 384;  // threads that do so

// A block takes every gridDim.x-th row; a thread has the same columns of all of them and sums their part of the weight's
// gradient, in registers where `kept` packs hold a row, otherwise in its block's row of the parts. Where one pack does, the
// next rows are fetched ahead; a thread reads only what it fetched itself.
template <class T, class W, int width, int kept, bool centered>
__global__ void __launch_bounds__(most_threads, kept == 1 ? 2 : 1) backward_kernel(Backward<T, W> a) {
  using C = compute_t<T>;
  __shared__ Two<C> shared[2][most_threads / 32];
  constexpr int slots = kept > 0 ? kept : 1;
  constexpr bool ahead = kept == 1;
  struct Row {
    Pack<T, width> dy, x, ds;
  };
  extern __shared__ double2 dynamic[];                         // 16 bytes aligned
  auto* fetched = reinterpret_cast<Pack<T, width>*>(dynamic);  // [stages][3][threads]
  const std::int64_t packs = a.columns / width;
  C dw[slots][width] = {}, db[slots][width] = {};
  C* dw_part = a.d_weight + blockIdx.x * a.columns;
  C* db_part = centered ? a.d_bias + blockIdx.x * a.columns : nullptr;
  Row own[slots];
  Pack<W, width> own_weight[slots];
  const auto each = [&](const auto& body) {
    if constexpr (kept > 0) {
#pragma unroll
      for (int p = 0; p < kept; ++p) {
        const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(p) * blockDim.x;
        if (i < packs) body(i, p);
      }
    } else {
      for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x) body(i, 0);
    }
  };
  const auto read = [&](std::int64_t row, std::int64_t i, Row& to) {
    to.dy = pack_at<T, width>(a.dy + row * a.columns, i);
    to.x = pack_at<T, width>(a.x + row * a.columns, i);
    if (a.ds) to.ds = pack_at<T, width>(a.ds + row * a.columns, i);
  };
  const auto fetch = [&](std::int64_t row, int stage) {
    if constexpr (ahead) {
      if (row < a.rows && threadIdx.x < packs) {
        const std::int64_t at = row * a.columns;
        auto* to = fetched + stage * 3 * blockDim.x + threadIdx.x;
        __pipeline_memcpy_async(to, &pack_at<T, width>(a.dy + at, threadIdx.x), sizeof(*to));
        __pipeline_memcpy_async(to + blockDim.x, &pack_at<T, width>(a.x + at, threadIdx.x), sizeof(*to));
        if (a.ds) __pipeline_memcpy_async(to + 2 * blockDim.x, &pack_at<T, width>(a.ds + at, threadIdx.x), sizeof(*to));
      }
      __pipeline_commit();
    }
  };
  for (int stage = 0; stage < stages; ++stage) fetch(blockIdx.x + static_cast<std::int64_t>(stage) * gridDim.x, stage);
  each([&](std::int64_t i, int p) {
    if constexpr (kept > 0) {
      own_weight[p] = pack_at<W, width>(a.weight, i);
    } else {
      for (int j = 0; j < width; ++j) {
        dw_part[i * width + j] = 0;
        if constexpr (centered) db_part[i * width + j] = 0;
      }
    }
  });
  int turn = 0, stage = 0;
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const C rstd = a.rstd[row];
    C mean = 0;
    if constexpr (centered) mean = a.mean[row];
    if constexpr (ahead) {
      __pipeline_wait_prior(stages - 1);
      const auto* from = fetched + stage * 3 * blockDim.x + threadIdx.x;
      own[0] = {from[0], from[blockDim.x], from[2 * blockDim.x]};
      fetch(row + static_cast<std::int64_t>(stages) * gridDim.x, stage);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    Two<C> sums{0, 0};
    each([&](std::int64_t i, int p) {
      if constexpr (!ahead) read(row, i, own[p]);
      if constexpr (kept == 0) own_weight[p] = pack_at<W, width>(a.weight, i);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C d = load(own[p].dy.at[j]), scaled = (load(own[p].x.at[j]) - mean) * rstd, g = d * load(own_weight[p].at[j]);
        sums.first += g * scaled;
        if constexpr (centered) sums.second += g;
        if constexpr (kept > 0) {
          dw[p][j] += d * scaled;
          if constexpr (centered) db[p][j] += d;
        } else {
          dw_part[i * width + j] += d * scaled;
          if constexpr (centered) db_part[i * width + j] += d;
        }
      }
    });
    const C n = static_cast<C>(a.columns);
    sums = sums_of_block(sums, shared[turn]);
    const C along = sums.first / n, total = sums.second / n;
    each([&](std::int64_t i, int p) {
      if constexpr (kept == 0) {
        read(row, i, own[p]);
        own_weight[p] = pack_at<W, width>(a.weight, i);
      }
      Pack<T, width> out;
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C g = load(own[p].dy.at[j]) * load(own_weight[p].at[j]), scaled = (load(own[p].x.at[j]) - mean) * rstd;
        C d = rstd * (g - total - scaled * along);
        if (a.ds) d += load(own[p].ds.at[j]);
        out.at[j] = store<T>(d);
      }
      pack_at<T, width>(a.dx + row * a.columns, i) = out;
      if (!a.normed) return;
      Pack<W, width> bias{};
      if constexpr (centered) bias = pack_at<W, width>(a.bias, i);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        C y = (load(own[p].x.at[j]) - mean) * rstd * load(own_weight[p].at[j]);
        if constexpr (centered) y += load(bias.at[j]);
        out.at[j] = store<T>(y);
      }
      pack_at<T, width>(a.normed + row * a.columns, i) = out;
    });
  }
  if constexpr (kept > 0)
    each([&](std::int64_t i, int p) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        dw_part[i * width + j] = dw[p][j];
        if constexpr (centered) db_part[i * width + j] = db[p][j];
      }
    });
}

// The types of elements and weights that occur together.
template <class Body>
void with_types(const NormShape& shape, const Body& body) {
  with_type(shape.type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (shape.weight_type == Element::f32) return body(t, float{});
    }
    body(t, t);
  });
}

template <class Body>
void with_centered(bool centered, const Body& body) {
  centered ? body(std::true_type{}) : body(std::false_type{});
}

template <int value>
using Number = std::integral_constant<int, value>;

std::int64_t packs_of(const NormShape& shape) {
  const std::int64_t width = shape.type == Element::f64 ? 2 : shape.type == Element::f32 ? 4 : 8;
  return shape.columns % width == 0 ? shape.columns / width : shape.columns;
}

// How backward's blocks share a row: packs that a thread keeps (0: too many to keep) and threads, in whole warps.
struct Share {
  int kept, threads;
};
Share backward_share(const NormShape& shape) {
  const std::int64_t packs = packs_of(shape);
  // One that fetches ahead has its rows in shared memory, of which 48 KiB are there for the asking.
  for (const int kept : {1, 2, 4})
    if (packs <= kept * (kept == 1 ? most_ahead : most_threads))
      return {kept, static_cast<int>(std::max<std::int64_t>(1, ((packs + kept - 1) / kept + 31) / 32) * 32)};
  return {0, most_threads};
}

}  // namespace

std::int64_t norm_parts(const NormShape& shape) {
  // As many blocks as keep a large GPU's memory busy, but at least 8 rows for each, so that the parts stay small.
  const std::int64_t blocks = 132 * std::max(1, 1024 / backward_share(shape).threads);
  return std::max<std::int64_t>(1, std::min(blocks, (shape.rows + 7) / 8));
}

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
        forward_kernel<T, W, decltype(width)::value, decltype(kept)::value, decltype(centered)::value>
            <<<static_cast<unsigned>((shape.rows + rows - 1) / rows), dim3(threads, rows), 0, stream>>>(a);
      };
      if (!packed || packs > 8 * most_threads)
        run(Number<1>{}, Number<0>{}, shape.columns > 1024 ? 256 : 32);
      else if (packs <= 4 * 32)
        run(Number<wide>{}, Number<4>{}, 32);
      else
        run(Number<wide>{}, Number<8>{}, static_cast<int>((packs + 8 * 32 - 1) / (8 * 32) * 32));
    });
  });
}

void launch_norm_backward(const NormShape& shape, const NormBackward& memory, cudaStream_t stream) {
  with_types(shape, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    using C = compute_t<T>;
    const std::int64_t parts = norm_parts(shape);
    C* scratch = static_cast<C*>(memory.parts);
    const Backward<T, W> a{static_cast<const T*>(memory.d_normed),
                           static_cast<const T*>(memory.d_stream),
                           static_cast<const T*>(memory.x),
                           static_cast<const W*>(memory.weight),
                           static_cast<const W*>(memory.bias),
                           static_cast<const C*>(memory.mean),
                           static_cast<const C*>(memory.rstd),
                           static_cast<T*>(memory.dx),
                           static_cast<T*>(memory.normed),
                           scratch,
                           scratch + parts * shape.columns,
                           shape.rows,
                           shape.columns};
    constexpr int wide = full_width<T>;
    const bool packed = shape.columns % wide == 0 && aligned({memory.d_normed, memory.d_stream, memory.x, memory.dx, memory.normed}, 16) &&
                        aligned({memory.weight, memory.bias}, sizeof(W) * wide);
    const int fits = backward_share(shape).kept, block = backward_share(shape).threads;
    with_centered(shape.centered, [&](auto centered) {
      const auto run = [&](auto width, auto kept) {
        backward_kernel<T, W, decltype(width)::value, decltype(kept)::value, decltype(centered)::value>
            <<<static_cast<unsigned>(parts), block, decltype(kept)::value == 1 ? stages * 3 * 16 * block : 0, stream>>>(a);
      };
      if (!packed || fits == 0)
        run(Number<1>{}, Number<0>{});
      else if (fits == 1)
        run(Number<wide>{}, Number<1>{});
      else if (fits == 2)
        run(Number<wide>{}, Number<2>{});
      else
        run(Number<wide>{}, Number<4>{});
    });
    sum_parts<C>(scratch, memory.d_weight, parts, shape.columns, stream);
    if (shape.centered) sum_parts<C>(scratch + parts * shape.columns, memory.d_bias, parts, shape.columns, stream);
  });
}

}  // namespace bonfire::cuda
