#include "bonfire/cuda/embedding.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

// Positions of the sorted tokens are cut into pieces of so many. A run of one token that crosses from piece to piece is
// summed piece by piece, and then over its pieces: tokens that are everywhere take little longer than others.
constexpr std::int64_t piece = 64;

constexpr int threads = 256;

template <class O, class T>
struct Adding {
  O* out;
  const T* gradient;
  const std::int64_t *tokens, *order;
  compute_t<O>*
      parts;  // of each piece two rows: of a run that begins where it does or before, of one that goes on behind it
  std::int64_t rows, columns;
};

template <class O, int width>
__device__ void add_to(O* to, const compute_t<O> (&sum)[width]) {
#pragma unroll
  for (int j = 0; j < width; ++j) to[j] = store<O>(load(to[j]) + sum[j]);
}

// A block for each position; the one where a run begins, or a piece within it, adds up what of the run is in the piece.
template <class O, class T, int width>
__global__ void add_kernel(Adding<O, T> a) {
  wait_for_kernels_before();
  using C = compute_t<O>;
  const std::int64_t begin = blockIdx.x, token = a.tokens[begin], in_piece = begin % piece;
  const bool goes_on = begin > 0 && a.tokens[begin - 1] == token;
  if (goes_on && in_piece != 0) return;
  const std::int64_t piece_end = min(a.rows, begin - in_piece + piece);
  std::int64_t end = begin + 1;
  while (end < piece_end && a.tokens[end] == token) ++end;
  const bool whole = !goes_on && (end == a.rows || a.tokens[end] != token);
  C* part = a.parts + (begin / piece * 2 + (in_piece != 0)) * a.columns;
  for (std::int64_t i = threadIdx.x; i < a.columns / width; i += threads) {
    C sum[width] = {};
#pragma unroll 4
    for (std::int64_t at = begin; at < end; ++at) {
      const Pack<T, width> x = pack_at<T, width>(a.gradient + a.order[at] * a.columns, i);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += static_cast<C>(element(x, j));
    }
    if (whole) {
      add_to<O, width>(a.out + token * a.columns + i * width, sum);
    } else {
#pragma unroll
      for (int j = 0; j < width; ++j) part[i * width + j] = sum[j];
    }
  }
}

constexpr int lanes = 32, groups = 8;  // of a block that sums over pieces: a group has every eighth

// A block for each border between two pieces, and some columns; the first border that a run crosses adds up its parts.
template <class O, class T, int width>
__global__ void __launch_bounds__(lanes* groups) add_parts_kernel(Adding<O, T> a) {
  wait_for_kernels_before();
  using C = compute_t<O>;
  const std::int64_t first = blockIdx.x, border = (first + 1) * piece, token = a.tokens[border];
  if (a.tokens[border - 1] != token) return;
  if (first > 0 && a.tokens[border - piece - 1] == token) return;
  __shared__ C shared[groups][lanes][width];
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * lanes + threadIdx.x;
  const bool mine = i < a.columns / width;
  C sum[width] = {};
  const auto add = [&](std::int64_t row) {
#pragma unroll
    for (int j = 0; j < width; ++j) sum[j] += a.parts[row * a.columns + i * width + j];
  };
  std::int64_t last = first + 1;  // piece that it reaches
  for (std::int64_t beyond = (a.rows + piece - 1) / piece; last + 1 < beyond;) {
    const std::int64_t middle = (last + beyond) / 2;
    (a.tokens[middle * piece] == token ? last : beyond) = middle;
  }
  if (mine) {
    std::int64_t at = first + threadIdx.y;
    if (threadIdx.y == 0) {
      add(2 * first + (a.tokens[border - piece] != token));
      at += groups;
    }
#pragma unroll 4
    for (; at <= last; at += groups) add(2 * at);
  }
#pragma unroll
  for (int j = 0; j < width; ++j) shared[threadIdx.y][threadIdx.x][j] = sum[j];
  __syncthreads();
  if (threadIdx.y > 0 || !mine) return;
#pragma unroll
  for (int group = 1; group < groups; ++group)
#pragma unroll
    for (int j = 0; j < width; ++j) sum[j] += shared[group][threadIdx.x][j];
  add_to<O, width>(a.out + token * a.columns + i * width, sum);
}

}  // namespace

std::int64_t embedding_parts(std::int64_t rows) { return 2 * ((rows + piece - 1) / piece); }

void launch_embedding_add(const EmbeddingMemory& memory, cudaStream_t stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto o, auto packed) {
      using O = decltype(o);
      constexpr int width = decltype(packed)::value;
      const Adding<O, T> a{static_cast<O*>(memory.out),
                           static_cast<const T*>(memory.gradient),
                           memory.tokens,
                           memory.order,
                           static_cast<compute_t<O>*>(memory.parts),
                           memory.rows,
                           memory.columns};
      launch(add_kernel<O, T, width>, {static_cast<unsigned>(memory.rows), threads}, stream, a);
      const auto borders = static_cast<unsigned>((memory.rows - 1) / piece);
      const auto tiles = static_cast<unsigned>((memory.columns / width + lanes - 1) / lanes);
      if (borders > 0) launch(add_parts_kernel<O, T, width>, {dim3(borders, tiles), dim3(lanes, groups)}, stream, a);
    };
    const auto choose = [&](auto o) {
      if (memory.columns % 4 == 0 && aligned({memory.gradient}, 4 * sizeof(T)))
        run(o, std::integral_constant<int, 4>{});
      else
        run(o, std::integral_constant<int, 1>{});
    };
    if constexpr (sizeof(T) == 2) {
      if (memory.out_type == Element::f32) return choose(float{});
    }
    choose(t);
  });
}

}  // namespace bonfire::cuda
