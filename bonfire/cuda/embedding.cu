#include "bonfire/cuda/embedding.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;

// A block for each position; the one where a token's run begins adds up the whole run.
template <class O, class T, int width>
__global__ void add_kernel(O* out, const T* __restrict__ gradient, const std::int64_t* __restrict__ tokens,
                           const std::int64_t* __restrict__ order, std::int64_t rows, std::int64_t columns) {
  wait_for_kernels_before();
  using C = compute_t<O>;
  const std::int64_t begin = blockIdx.x, token = tokens[begin];
  if (begin > 0 && tokens[begin - 1] == token) return;
  std::int64_t end = begin + 1;
  while (end < rows && tokens[end] == token) ++end;
  for (std::int64_t i = threadIdx.x; i < columns / width; i += threads) {
    C sum[width] = {};
#pragma unroll 4
    for (std::int64_t at = begin; at < end; ++at) {
      const Pack<T, width> x = pack_at<T, width>(gradient + order[at] * columns, i);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += static_cast<C>(element(x, j));
    }
    O* to = out + token * columns + i * width;
#pragma unroll
    for (int j = 0; j < width; ++j) to[j] = store<O>(load(to[j]) + sum[j]);
  }
}

}  // namespace

void launch_embedding_add(const EmbeddingMemory& memory, cudaStream_t stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto o, auto width) {
      using O = decltype(o);
      launch(add_kernel<O, T, decltype(width)::value>, {static_cast<unsigned>(memory.rows), threads}, stream,
             static_cast<O*>(memory.out), static_cast<const T*>(memory.gradient), memory.tokens, memory.order, memory.rows,
             memory.columns);
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
