#include <cuda_pipeline.h>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"
#include "bonfire/cuda/norm.h"
#include "bonfire/cuda/norm_types.cuh"
#include "bonfire/cuda/parts.cuh"

namespace bonfire::cuda {
namespace {

// Which rows make which part of the sums over them: first `large` parts, then smaller ones.
struct RowParts {
  std::int64_t count, large, rows_of_large, rows_of_small;
};
RowParts parts_of(std::int64_t rows, bool block_for_each_multiprocessor) {
  constexpr std::int64_t least = 8;         // rows of a part, so that the parts stay small
  constexpr std::int64_t processors = 132;  // of a large GPU; equal shapes give equal parts on all of them
  const auto above = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t blocks = block_for_each_multiprocessor ? processors : 2 * processors;
  const std::int64_t count = std::clamp<std::int64_t>(above(rows, least), 1, blocks);
  if (!block_for_each_multiprocessor || rows < 3 * least * blocks) return {count, count, above(rows, count), 0};
  // Two thirds of the rows are for a block on each multiprocessor, the rest, in parts of half the size, for those that are
  // done. Where others have some of the multiprocessors, a large part that begins late does not end after all others have.
  const std::int64_t rows_of_large = above(2 * rows, 3 * blocks);
  return {2 * blocks, blocks, rows_of_large, above(std::max<std::int64_t>(rows - blocks * rows_of_large, 1), blocks)};
}
struct RowRange {
  std::int64_t begin, end;
};
__device__ RowRange rows_of_part(const RowParts& parts, std::int64_t rows, std::int64_t part) {
  const bool is_large = part < parts.large;
  const std::int64_t begin =
      is_large ? part * parts.rows_of_large : parts.large * parts.rows_of_large + (part - parts.large) * parts.rows_of_small;
  return {begin, min(rows, begin + (is_large ? parts.rows_of_large : parts.rows_of_small))};
}

template <class T, class W>
struct Backward {
  const T *dy, *ds, *x;
  const W *weight, *bias;
  const compute_t<T>*mean, *rstd;
  T *dx, *normed;
  compute_t<T>*d_weight, *d_bias, *dx_sums;  // parts: one row for each block
  std::int64_t rows, columns;
  RowParts parts;
  int stages;
};

template <class C>
struct Two {
  C first, second;
};

// A pack of each of a row's tensors.
template <class T, int width>
struct Row {
  Pack<T, width> dy, x, ds;
};

// What backward does with a pack, in two passes with sums over the row between them.
template <class T, class W, int width, bool centered>
struct Passes {
  using C = compute_t<T>;
  C mean, rstd;

  __device__ C scaled(C x) const { return (x - mean) * rstd; }
  template <class Gather>
  __device__ void gather(const Row<T, width>& row, const Pack<W, width>& weight, Two<C>& sums,
                         const Gather& parameters) const {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C d = element(row.dy, j), at = scaled(element(row.x, j)), g = d * element(weight, j);
      sums.first += g * at;
      if constexpr (centered) sums.second += g;
      parameters(j, d * at, d);
    }
  }
  struct Results {
    Pack<T, width> dx, normed;
  };
  __device__ Results finish(const Row<T, width>& row, const Pack<W, width>& weight, const Two<C>& means, bool with_ds,
                            bool again, const Pack<W, width>& bias) const {
    Results out;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C w = element(weight, j), at = scaled(element(row.x, j));
      C d = rstd * (element(row.dy, j) * w - means.second - at * means.first);
      if (with_ds) d += element(row.ds, j);
      out.dx.at[j] = store<T>(d);
      if (again) {
        C y = at * w;
        if constexpr (centered) y += element(bias, j);
        out.normed.at[j] = store<T>(y);
      }
    }
    return out;
  }
};

// Rows that are on their way to shared memory, while the one before is worked on: as many as there is memory for.
constexpr int most_stages = 4;
constexpr int most_groups = 15;  // as many barriers as a block has, but for one
constexpr int most_warps = 16;   // of a group
// Of a group's sums over a row, which two of its rows have at a time.
template <class C>
constexpr int table_bytes = 2 * most_warps* static_cast<int>(sizeof(Two<C>));

// Until no more than stages - 1 of the rows that were asked for last are still on their way.
__device__ void wait_for_row(int stages) {
  switch (stages) {
    case 1: return __pipeline_wait_prior(0);
    case 2: return __pipeline_wait_prior(1);
    case 3: return __pipeline_wait_prior(2);
    default: return __pipeline_wait_prior(most_stages - 1);
  }
}
// Threads of a block whose threads keep one pack of a row, or two: what registers allow.
template <int kept>
constexpr int most_in_groups = kept == 1 ? 512 : 640;

// blockDim.x threads, a group, have a row; a block is as many groups as its multiprocessor holds, and each takes rows of its
// own, which it fetches ahead. A thread has the same columns of all of them, `kept` packs, and sums their part of the
// parameters' gradients; it reads only what it fetched itself. Where `warps` is not 0, groups have that many, neither ds nor
// normed is null, and there are most_stages: what there is to do for a row is so little that asking shows.
template <class T, class W, int width, int kept, int warps, bool centered, bool sums_too>
__global__ void __launch_bounds__(most_in_groups<kept>, 1) groups_kernel(Backward<T, W> a) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  using P = Pack<T, width>;
  extern __shared__ double2 dynamic[];  // 16 bytes aligned: a table for each group, then what each has fetched
  const int lanes = warps > 0 ? 32 * warps : blockDim.x, packs = static_cast<int>(a.columns / width);
  const int stages = warps > 0 ? most_stages : a.stages;
  const bool with_ds = warps > 0 || a.ds, again = warps > 0 || a.normed;
  auto* table = reinterpret_cast<Two<C>*>(dynamic) + threadIdx.y * 2 * most_warps;
  P* fetched = reinterpret_cast<P*>(dynamic) + blockDim.y * (table_bytes<C> / sizeof(P)) +
               threadIdx.y * stages * 3 * kept * lanes + threadIdx.x;  // [stages][3][kept][lanes]
  C dw[kept][width] = {}, db[centered ? kept : 1][width] = {}, all[sums_too ? kept : 1][width] = {};
  Pack<W, width> weight[kept];
  const auto each = [&](const auto& body) {
#pragma unroll
    for (int p = 0; p < kept; ++p) {
      const int i = threadIdx.x + p * lanes;
      if (i < packs) body(i, p);
    }
  };
  const auto [first_row, end] = rows_of_part(a.parts, a.rows, blockIdx.x);
  const auto fetch = [&, end = end](std::int64_t row, int stage) {
    if (row < end)
      each([&](int i, int p) {
        P* to = fetched + (stage * 3 * kept + p) * lanes;
        const auto get = [&](const T* from, int which) {
          __pipeline_memcpy_async(to + which * kept * lanes, &pack_at<T, width>(from + row * a.columns, i), sizeof(P));
        };
        get(a.dy, 0);
        get(a.x, 1);
        if (with_ds) get(a.ds, 2);
      });
    __pipeline_commit();
  };
  const int step = blockDim.y;
  std::int64_t row = first_row + threadIdx.y;
  for (int stage = 0; stage < stages; ++stage) fetch(row + stage * step, stage);
  each([&](int i, int p) { weight[p] = pack_at<W, width>(a.weight, i); });
  Passes<T, W, width, centered> at{};
  const auto statistics = [&, end = end](std::int64_t of) {
    if (of < end) at = {centered ? a.mean[of] : C(0), a.rstd[of]};
  };
  statistics(row);
  int turn = 0, stage = 0;
  const C of_each = C(1) / static_cast<C>(a.columns);
  for (; row < end; row += step, turn ^= 1) {
    const auto now = at;
    statistics(row + step);
    wait_for_row(stages);
    Row<T, width> own[kept];
    each([&](int, int p) {
      const P* from = fetched + (stage * 3 * kept + p) * lanes;
      own[p] = {from[0], from[kept * lanes], from[2 * kept * lanes]};
      stay_packed(weight[p]);
    });
    fetch(row + stages * step, stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
    Two<C> sums{0, 0};
    each([&](int, int p) {
      now.gather(own[p], weight[p], sums, [&](int j, C to_weight, C to_bias) {
        dw[p][j] += to_weight;
        if constexpr (centered) db[p][j] += to_bias;
      });
    });
    sums.first = sum_of_warp(sums.first);
    if constexpr (centered) sums.second = sum_of_warp(sums.second);
    if (lanes > 32) {
      Two<C>* of_warps = table + turn * most_warps;
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
      asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(lanes) : "memory");
      sums = {0, 0};
#pragma unroll
      for (int warp = 0; warp < lanes / 32; ++warp) {
        sums.first += of_warps[warp].first;
        if constexpr (centered) sums.second += of_warps[warp].second;
      }
    }
    sums = {sums.first * of_each, sums.second * of_each};
    each([&](int i, int p) {
      stay_packed(own[p].dy);
      stay_packed(own[p].x);
      stay_packed(weight[p]);
      Pack<W, width> bias{};
      if constexpr (centered)
        if (again) bias = pack_at<W, width>(a.bias, i);
      const auto out = now.finish(own[p], weight[p], sums, with_ds, again, bias);
      if constexpr (sums_too)
#pragma unroll
        for (int j = 0; j < width; ++j) all[p][j] += element(out.dx, j);
      write_once<T, width>(a.dx + row * a.columns, i, out.dx);
      if (again) write_once<T, width>(a.normed + row * a.columns, i, out.normed);
    });
  }
  __pipeline_wait_prior(0);
  // The groups' sums make one of the block's, in the memory that rows were fetched to.
  static_assert(width * sizeof(C) <= 3 * sizeof(P));
  auto* gathered = reinterpret_cast<C*>(dynamic);  // [groups][columns]
  const auto gather = [&](const auto& of, C* parts) {
    __syncthreads();
    each([&](int i, int p) {
#pragma unroll
      for (int j = 0; j < width; ++j) gathered[threadIdx.y * a.columns + i * width + j] = of[p][j];
    });
    __syncthreads();
    for (std::int64_t c = threadIdx.y * lanes + threadIdx.x; c < a.columns; c += blockDim.y * lanes) {
      C sum = 0;
      for (int group = 0; group < blockDim.y; ++group) sum += gathered[group * a.columns + c];
      parts[blockIdx.x * a.columns + c] = sum;
    }
  };
  gather(dw, a.d_weight);
  if constexpr (centered) gather(db, a.d_bias);
  if constexpr (sums_too) gather(all, a.dx_sums);
}

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

// For rows of any length: a block reads those of its part twice, and sums into its row of the parts.
template <class T, class W, int width, bool centered>
__global__ void __launch_bounds__(most_threads) long_rows_kernel(Backward<T, W> a) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  __shared__ Two<C> shared[2][most_threads / 32];
  const std::int64_t packs = a.columns / width;
  C* dw = a.d_weight + blockIdx.x * a.columns;
  C* db = centered ? a.d_bias + blockIdx.x * a.columns : nullptr;
  C* all = a.dx_sums ? a.dx_sums + blockIdx.x * a.columns : nullptr;
  for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x)
    for (int j = 0; j < width; ++j) {
      dw[i * width + j] = 0;
      if constexpr (centered) db[i * width + j] = 0;
      if (all) all[i * width + j] = 0;
    }
  int turn = 0;
  const auto [first_row, end] = rows_of_part(a.parts, a.rows, blockIdx.x);
  for (std::int64_t row = first_row; row < end; ++row, turn ^= 1) {
    const Passes<T, W, width, centered> at{centered ? a.mean[row] : C(0), a.rstd[row]};
    const auto read = [&](std::int64_t i) {
      Row<T, width> own{pack_at<T, width>(a.dy + row * a.columns, i), pack_at<T, width>(a.x + row * a.columns, i), {}};
      if (a.ds) own.ds = pack_at<T, width>(a.ds + row * a.columns, i);
      return own;
    };
    Two<C> sums{0, 0};
    for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x)
      at.gather(read(i), pack_at<W, width>(a.weight, i), sums, [&](int j, C to_weight, C to_bias) {
        dw[i * width + j] += to_weight;
        if constexpr (centered) db[i * width + j] += to_bias;
      });
    sums = sums_of_block(sums, shared[turn]);
    const C n = static_cast<C>(a.columns);
    sums = {sums.first / n, sums.second / n};
    for (std::int64_t i = threadIdx.x; i < packs; i += blockDim.x) {
      const Row<T, width> own = read(i);
      const Pack<W, width> weight = pack_at<W, width>(a.weight, i);
      Pack<W, width> bias{};
      if constexpr (centered)
        if (a.normed) bias = pack_at<W, width>(a.bias, i);
      const auto out = at.finish(own, weight, sums, a.ds, a.normed, bias);
      pack_at<T, width>(a.dx + row * a.columns, i) = out.dx;
      if (all)
        for (int j = 0; j < width; ++j) all[i * width + j] += element(out.dx, j);
      if (a.normed) pack_at<T, width>(a.normed + row * a.columns, i) = out.normed;
    }
  }
}

// How backward's blocks share rows that are aligned: packs that a thread keeps (0: too many to keep), threads of a group, in
// whole warps.
struct Grouping {
  int kept, threads;
};
Grouping grouping_of(const NormShape& shape) {
  const std::int64_t width = shape.type == Element::f64   ? 2
                             : shape.type == Element::f32 ? 4
                                                          : 8,
                     packs = shape.columns / width;
  if (shape.columns % width != 0 || packs > 2 * most_threads) return {0, most_threads};
  // A thread of a centered one sums more, so it keeps two only where it must.
  const int kept = packs <= (shape.centered ? 384 : 256) ? 1 : 2;
  return {kept, static_cast<int>((packs + kept * 32 - 1) / (kept * 32)) * 32};
}

RowParts row_parts(const NormShape& shape) { return parts_of(shape.rows, grouping_of(shape).kept > 0); }

// What of that a multiprocessor has the shared memory for: groups of a block, 0 where it has too little for one, and rows
// that are on their way to each.
struct Room {
  int groups, stages;
  std::size_t bytes;
};
Room room_for(const NormShape& shape, const Grouping& grouping, int block_shared) {
  // Weights and biases pass through what is left, the first level of the caches.
  const int memory = std::min(block_shared, 200 * 1024);
  const int table = shape.type == Element::f64 ? table_bytes<double> : table_bytes<float>;
  const int of_row = 3 * grouping.kept * grouping.threads * 16;
  const int stages = std::min((memory - table) / of_row, most_stages);
  if (stages < 1) return {0, 0, 0};
  const int of_group = table + stages * of_row;
  const int threads = grouping.kept == 1 ? most_in_groups<1> : most_in_groups<2>;
  const int groups = std::min({threads / grouping.threads, memory / of_group, most_groups});
  return {groups, stages, static_cast<std::size_t>(groups) * static_cast<std::size_t>(of_group)};
}

}  // namespace

std::int64_t norm_parts(const NormShape& shape) { return row_parts(shape).count; }

void launch_norm_backward(const NormShape& shape, const NormBackward& memory, cudaStream_t stream) {
  with_types(shape, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    using C = compute_t<T>;
    const RowParts row_shares = row_parts(shape);
    const std::int64_t parts = row_shares.count;
    C* scratch = static_cast<C*>(memory.parts);
    const Grouping grouping = grouping_of(shape);
    const Room room = grouping.kept > 0 ? room_for(shape, grouping, current_gpu().block_shared) : Room{};
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
                           memory.dx_sums ? scratch + 2 * parts * shape.columns : nullptr,
                           shape.rows,
                           shape.columns,
                           row_shares,
                           room.stages};
    constexpr int wide = full_width<T>;
    const bool packed = shape.columns % wide == 0 &&
                        aligned({memory.d_normed, memory.d_stream, memory.x, memory.dx, memory.normed}, 16) &&
                        aligned({memory.weight, memory.bias}, sizeof(W) * wide);
    const auto blocks = static_cast<unsigned>(parts);
    with_centered(shape.centered, [&](auto centered) {
      constexpr bool is_centered = decltype(centered)::value;
      const auto launch_groups = [&](auto kept, auto warps, auto sums_too) {
        const auto kernel =
            groups_kernel<T, W, wide, decltype(kept)::value, decltype(warps)::value, is_centered, decltype(sums_too)::value>;
        launch(kernel, {blocks, dim3(grouping.threads, room.groups), room.bytes}, stream, a);
      };
      const auto in_groups = [&](auto kept, auto sums_too) {
        if constexpr (sizeof(T) == 2)
          if (memory.d_stream && memory.normed && room.stages == most_stages) {
            if (grouping.threads == 4 * 32) return launch_groups(kept, Number<4>{}, sums_too);
            if (grouping.threads == 8 * 32) return launch_groups(kept, Number<8>{}, sums_too);
            if (grouping.threads == 3 * 32) return launch_groups(kept, Number<3>{}, sums_too);
          }
        launch_groups(kept, Number<0>{}, sums_too);
      };
      const auto keeping = [&](auto kept) {
        if constexpr (is_centered)
          if (memory.dx_sums) return in_groups(kept, std::true_type{});
        in_groups(kept, std::false_type{});
      };
      if (packed && room.groups > 0 && grouping.kept == 1)
        keeping(Number<1>{});
      else if (packed && room.groups > 0)
        keeping(Number<2>{});
      else if (packed)
        launch(long_rows_kernel<T, W, wide, is_centered>, {blocks, most_threads}, stream, a);
      else
        launch(long_rows_kernel<T, W, 1, is_centered>, {blocks, most_threads}, stream, a);
    });
    const auto out = [](void* p) { return static_cast<C*>(p); };
    sum_parts<C>(scratch, {{out(memory.d_weight), out(memory.d_bias), out(memory.dx_sums)}}, parts, shape.columns, stream);
  });
}

}  // namespace bonfire::cuda
