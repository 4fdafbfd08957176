#include "bonfire/cuda/quantized_activation.h"

#include <type_traits>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/eight_bits.cuh"
#include "bonfire/cuda/launch.cuh"
#include "bonfire/kernels/agreed_math.h"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 8;  // elements that a thread reads at once

template <bool wide_range>
__device__ float delayed_scale(DelayedMemory& a) {
  if (a.later) {
    const int shift = static_cast<int>(*a.later % a.length);
    a.now = (a.now + shift) % a.length;
    a.next = (a.next + shift) % a.length;
  }
  float magnitude = 0;
  for (int i = 0; i < a.length; ++i)
    if (i != a.now && i != a.next) magnitude = fmaxf(magnitude, a.history[i]);
  const float scale = scale_to_eight_bits<wide_range>(magnitude);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *a.inverse = 1.0f / scale;
    a.history[a.next] = 0;
  }
  return scale;
}

// Eight numbers as T holds them, scaled: two words of eight bits. `largest` is raised to their magnitudes.
template <class T, bool wide_range>
__device__ uint2 rounded(const float (&v)[width], float scale, float& largest) {
  float as_held[width];
#pragma unroll
  for (int j = 0; j < width; ++j) {
    as_held[j] = load(store<T>(v[j]));
    largest = fmaxf(largest, magnitude_of(as_held[j]));
    as_held[j] = scaled(as_held[j], scale);
  }
  return make_uint2(eight_bits<wide_range>(as_held[0], as_held[1], as_held[2], as_held[3]),
                    eight_bits<wide_range>(as_held[4], as_held[5], as_held[6], as_held[7]));
}

// The calling thread's four rows of eight columns, twice.
template <class Body>
__device__ void for_each_patch(std::int64_t rows, std::int64_t columns, const Body& body) {
  const int lane = threadIdx.x % 16;
  for (int half = 0; half < 2; ++half) {
    const int group = half * 16 + threadIdx.x / 16;
    const std::int64_t r = static_cast<std::int64_t>(blockIdx.y) * tile + 4 * group;
    const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * tile + width * lane;
    if (r < rows && c < columns) body(lane, group, r, c);
  }
}

template <class T, bool transposes>
__global__ void __launch_bounds__(threads) swiglu_kernel(QuantizedSwigluMemory a) {
  wait_for_kernels_before();
  __shared__ std::conditional_t<transposes, TurnedTile, char> turned;
  const float scale = delayed_scale<false>(a.activated);
  float largest = 0;
  for_each_patch(a.rows, a.columns, [&](int lane, int group, std::int64_t r, std::int64_t c) {
    const T* gates = static_cast<const T*>(a.gate_up) + 2 * r * a.columns + c;
    Pack<T, width> gate[4], up[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = pack_at<T, width>(gates + 2 * i * a.columns, 0);
      up[i] = pack_at<T, width>(gates + (2 * i + 1) * a.columns, 0);
    }
    std::uint32_t low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const float g = element(gate[i], j);
        v[j] = g * sigmoid<T>(g) * element(up[i], j);
      }
      const uint2 eight = rounded<T, false>(v, scale, largest);
      low[i] = eight.x;
      high[i] = eight.y;
      *reinterpret_cast<uint2*>(static_cast<unsigned char*>(a.activated.values) + (r + i) * a.columns + c) = eight;
    }
    if constexpr (transposes) turned.put(lane, group, low, high);
  });
  note_largest(largest, a.activated.history + a.activated.now);
  if constexpr (transposes) {
    __syncthreads();
    turned.store(static_cast<unsigned char*>(a.activated.transposed), a.rows, a.columns,
                 static_cast<std::int64_t>(blockIdx.y) * tile, static_cast<std::int64_t>(blockIdx.x) * tile);
  }
}

template <class T, bool again>
__global__ void __launch_bounds__(threads) swiglu_backward_kernel(QuantizedSwigluMemory a) {
  wait_for_kernels_before();
  __shared__ TurnedTile d_gates, d_ups;
  __shared__ std::conditional_t<again, TurnedTile, char> activated;
  const float scale = delayed_scale<true>(a.d_gate_up);
  float scale_again = 1, largest = 0, largest_again = 0;
  if constexpr (again) scale_again = delayed_scale<false>(a.activated);
  for_each_patch(a.rows, a.columns, [&](int lane, int group, std::int64_t r, std::int64_t c) {
    const T* gates = static_cast<const T*>(a.gate_up) + 2 * r * a.columns + c;
    const T* d_out = static_cast<const T*>(a.d_out) + r * a.columns + c;
    std::uint32_t low[3][4], high[3][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pack<T, width> gate = pack_at<T, width>(gates + 2 * i * a.columns, 0);
      const Pack<T, width> up = pack_at<T, width>(gates + (2 * i + 1) * a.columns, 0);
      const Pack<T, width> d = pack_at<T, width>(d_out + i * a.columns, 0);
      float d_gate[width], d_up[width], out[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const float g = element(gate, j), s = sigmoid<T>(g), u = element(up, j), dj = element(d, j);
        d_gate[j] = silu_slope(g, s) * u * dj;
        d_up[j] = g * s * dj;
        out[j] = g * s * u;
      }
      const uint2 first = rounded<T, true>(d_gate, scale, largest), second = rounded<T, true>(d_up, scale, largest);
      unsigned char* to = static_cast<unsigned char*>(a.d_gate_up.values) + 2 * (r + i) * a.columns + c;
      *reinterpret_cast<uint2*>(to) = first;
      *reinterpret_cast<uint2*>(to + a.columns) = second;
      low[0][i] = first.x, high[0][i] = first.y;
      low[1][i] = second.x, high[1][i] = second.y;
      if constexpr (again) {
        const uint2 third = rounded<T, false>(out, scale_again, largest_again);
        low[2][i] = third.x, high[2][i] = third.y;
      }
    }
    d_gates.put(lane, group, low[0], high[0]);
    d_ups.put(lane, group, low[1], high[1]);
    if constexpr (again) activated.put(lane, group, low[2], high[2]);
  });
  note_largest(largest, a.d_gate_up.history + a.d_gate_up.now);
  if constexpr (again) note_largest(largest_again, a.activated.history + a.activated.now);
  __syncthreads();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * tile,
                     column = static_cast<std::int64_t>(blockIdx.x) * tile;
  auto* transposed = static_cast<unsigned char*>(a.d_gate_up.transposed);
  d_gates.store(transposed, a.rows, a.columns, row, column);
  d_ups.store(transposed + a.columns * a.rows, a.rows, a.columns, row, column);
  if constexpr (again) activated.store(static_cast<unsigned char*>(a.activated.transposed), a.rows, a.columns, row, column);
}

dim3 grid_of(const QuantizedSwigluMemory& memory) {
  return dim3(static_cast<unsigned>((memory.columns + tile - 1) / tile),
              static_cast<unsigned>((memory.rows + tile - 1) / tile));
}

template <class Body>
void with_narrow(Element type, const Body& body) {
  if (type == Element::f16)
    body(__half{});
  else
    body(__nv_bfloat16{});
}

}  // namespace

void launch_quantized_swiglu(const QuantizedSwigluMemory& memory, cudaStream_t stream) {
  with_narrow(memory.type, [&](auto t) {
    using T = decltype(t);
    if (memory.activated.transposed)
      launch(swiglu_kernel<T, true>, {grid_of(memory), threads}, stream, memory);
    else
      launch(swiglu_kernel<T, false>, {grid_of(memory), threads}, stream, memory);
  });
}

void launch_quantized_swiglu_backward(const QuantizedSwigluMemory& memory, cudaStream_t stream) {
  with_narrow(memory.type, [&](auto t) {
    using T = decltype(t);
    if (memory.activated.transposed)
      launch(swiglu_backward_kernel<T, true>, {grid_of(memory), threads}, stream, memory);
    else
      launch(swiglu_backward_kernel<T, false>, {grid_of(memory), threads}, stream, memory);
  });
}

}  // namespace bonfire::cuda
