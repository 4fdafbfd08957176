#include "bonfire/cuda/activation.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"
#include "bonfire/kernels/agreed_math.h"

namespace bonfire::cuda {
namespace {

// A thread works on one pack: many short blocks go faster than fewer long ones.
constexpr int threads = 256;

std::int64_t blocks_for(std::int64_t packs) { return (packs + threads - 1) / threads; }

// One block works on a piece of a row, so that no thread has to divide.
struct Pieces {
  std::int64_t blocks;
  int per_row;
};
Pieces pieces_of(std::int64_t rows, std::int64_t packs) {
  const auto per_row = blocks_for(packs);
  return {rows * per_row, static_cast<int>(per_row)};
}

// Backward with `again` puts the activation where its gradient was.
template <class T, int width, bool backward, bool again>
__global__ void swiglu_kernel(const T* __restrict__ gate_up, T* __restrict__ d_out, T* __restrict__ result,
                              std::int64_t columns, int per_row) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  const std::int64_t row = blockIdx.x / static_cast<unsigned>(per_row), packs = columns / width;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x % static_cast<unsigned>(per_row)) * threads + threadIdx.x;
  if (i >= packs) return;
  const T* gates = gate_up + 2 * row * columns;
  const T* ups = gates + columns;
  const Pack<T, width> gate = pack_at<T, width>(gates, i), up = pack_at<T, width>(ups, i);
  if constexpr (backward) {
    const Pack<T, width> d = pack_at<T, width>(d_out + row * columns, i);
    Pack<T, width> d_gate, d_up, out;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C g = element(gate, j), s = sigmoid<T>(g), dj = element(d, j);
      d_gate.at[j] = store<T>(silu_slope(g, s) * element(up, j) * dj);
      d_up.at[j] = store<T>(g * s * dj);
      if constexpr (again) out.at[j] = store<T>(g * s * element(up, j));
    }
    if constexpr (again) pack_at<T, width>(d_out + row * columns, i) = out;
    T* to = result + 2 * row * columns;
    pack_at<T, width>(to, i) = d_gate;
    pack_at<T, width>(to + columns, i) = d_up;
  } else {
    Pack<T, width> out;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C g = element(gate, j);
      out.at[j] = store<T>(g * sigmoid<T>(g) * element(up, j));
    }
    pack_at<T, width>(result + row * columns, i) = out;
  }
}

template <bool backward, bool again>
void swiglu(const SwigluMemory& memory, cudaStream_t stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto packed) {
      constexpr int width = decltype(packed)::value ? full_width<T> : 1;
      const Pieces pieces = pieces_of(memory.rows, memory.columns / width);
      launch(swiglu_kernel<T, width, backward, again>, {static_cast<unsigned>(pieces.blocks), threads}, stream,
             static_cast<const T*>(memory.gate_up), static_cast<T*>(const_cast<void*>(memory.d_out)),
             static_cast<T*>(memory.result), memory.columns, pieces.per_row);
    };
    const bool packed = memory.columns % full_width<T> == 0 && aligned({memory.gate_up, memory.d_out, memory.result}, 16);
    packed ? run(std::true_type{}) : run(std::false_type{});
  });
}

template <class T, int width, bool backward>
__global__ void gelu_kernel(const T* __restrict__ in, const T* __restrict__ d_out, T* __restrict__ result,
                            std::int64_t packs) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= packs) return;
  const Pack<T, width> x = pack_at<T, width>(in, i);
  Pack<T, width> d{}, out;
  if constexpr (backward) d = pack_at<T, width>(d_out, i);
#pragma unroll
  for (int j = 0; j < width; ++j) {
    const Gelu<T> gelu(element(x, j));
    out.at[j] = store<T>(backward ? element(d, j) * gelu.slope : gelu.value);
  }
  pack_at<T, width>(result, i) = out;
}

template <bool backward>
void gelu(const GeluMemory& memory, cudaStream_t stream) {
  if (memory.elements == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto packed) {
      constexpr int width = decltype(packed)::value ? full_width<T> : 1;
      const std::int64_t packs = memory.elements / width;
      launch(gelu_kernel<T, width, backward>, {static_cast<unsigned>(blocks_for(packs)), threads}, stream,
             static_cast<const T*>(memory.x), static_cast<const T*>(memory.d_out), static_cast<T*>(memory.result), packs);
    };
    const bool packed = memory.elements % full_width<T> == 0 && aligned({memory.x, memory.d_out, memory.result}, 16);
    packed ? run(std::true_type{}) : run(std::false_type{});
  });
}

template <class T, int width>
__global__ void scaled_kernel(const T* x, T* out, const compute_t<T>* factor, std::int64_t packs) {
  wait_for_kernels_before();
  const compute_t<T> scale = *factor;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= packs) return;
  const Pack<T, width> pack = pack_at<T, width>(x, i);
  Pack<T, width> scaled;
#pragma unroll
  for (int j = 0; j < width; ++j) scaled.at[j] = store<T>(element(pack, j) * scale);
  pack_at<T, width>(out, i) = scaled;
}

// bonfire::Random::block: Philox 4x32, ten rounds.
__device__ void philox(std::uint64_t key, std::uint64_t counter, std::uint32_t (&words)[4]) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const std::uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// A thread has the four elements of one block of the generator; the first and the last block may have fewer.
template <class T>
__global__ void dropout_kernel(const T* __restrict__ x, T* __restrict__ out, std::int64_t n, std::uint64_t threshold,
                               compute_t<T> scale, std::uint64_t key, std::uint64_t first) {
  wait_for_kernels_before();
  const std::uint64_t block = first / 4 + static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t begin = static_cast<std::int64_t>(block * 4) - static_cast<std::int64_t>(first);
  if (begin >= n) return;
  std::uint32_t words[4];
  philox(key, block, words);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::int64_t i = begin + j;
    if (i >= 0 && i < n) out[i] = words[j] < threshold ? store<T>(0) : store<T>(load(x[i]) * scale);
  }
}

}  // namespace

void launch_swiglu(const SwigluMemory& memory, cudaStream_t stream) { swiglu<false, false>(memory, stream); }
void launch_swiglu_backward(const SwigluMemory& memory, cudaStream_t stream) {
  memory.again ? swiglu<true, true>(memory, stream) : swiglu<true, false>(memory, stream);
}
void launch_gelu(const GeluMemory& memory, cudaStream_t stream) { gelu<false>(memory, stream); }
void launch_gelu_backward(const GeluMemory& memory, cudaStream_t stream) { gelu<true>(memory, stream); }

void launch_scaled(const ScaledMemory& memory, cudaStream_t stream) {
  if (memory.elements == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto packed) {
      constexpr int width = decltype(packed)::value ? full_width<T> : 1;
      const std::int64_t packs = memory.elements / width;
      launch(scaled_kernel<T, width>, {static_cast<unsigned>(blocks_for(packs)), threads}, stream,
             static_cast<const T*>(memory.x), static_cast<T*>(memory.out), static_cast<const compute_t<T>*>(memory.factor),
             packs);
    };
    const bool packed = memory.elements % full_width<T> == 0 && aligned({memory.x, memory.out}, 16);
    packed ? run(std::true_type{}) : run(std::false_type{});
  });
}

void launch_dropout(const DropoutMemory& memory, cudaStream_t stream) {
  if (memory.elements == 0) return;
  const auto threshold = static_cast<std::uint64_t>(memory.p * 4294967296.0);
  const std::int64_t blocks = memory.elements / 4 + 2;  // of the generator, at most
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    launch(dropout_kernel<T>, {static_cast<unsigned>((blocks + threads - 1) / threads), threads}, stream,
           static_cast<const T*>(memory.x), static_cast<T*>(memory.out), memory.elements, threshold,
           static_cast<compute_t<T>>(1 / (1 - memory.p)), memory.key, memory.first);
  });
}

}  // namespace bonfire::cuda
