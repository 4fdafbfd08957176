#include "bonfire/cuda/optimizer.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 256;
constexpr int width = 4;  // elements that a thread moves at once

// Writes `count` values, which lie `count` elements aligned, as type L.
template <class L, int count, class C>
__device__ void store_as(void* low, std::int64_t index, const Pack<C, count>& values) {
  Pack<L, count> out;
#pragma unroll
  for (int j = 0; j < count; ++j) out.at[j] = store<L>(static_cast<compute_t<L>>(values.at[j]));
  pack_at<L, count>(static_cast<L*>(low), index) = out;
}

template <int count, class C>
__device__ void store_low(void* low, Element type, std::int64_t index, const Pack<C, count>& values) {
  switch (type) {
    case Element::f32: return store_as<float>(low, index, values);
    case Element::f64: return store_as<double>(low, index, values);
    case Element::bf16: return store_as<__nv_bfloat16>(low, index, values);
    case Element::f16: return store_as<__half>(low, index, values);
  }
}

std::size_t size_of(Element type) { return type == Element::f64 ? 8 : type == Element::f32 ? 4 : 2; }

template <class C>
struct AdamBuffersOf {
  C* p;
  C* m;
  C* v;
  C* top;
};

template <class C>
struct AdamConstants {
  C scale, decay, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps;
};

template <class C>
__host__ __device__ AdamConstants<C> constants(const AdamNumbers& n) {
  return {static_cast<C>(n.scale),     static_cast<C>(n.decay),     static_cast<C>(n.keep),
          static_cast<C>(n.beta1),     static_cast<C>(1 - n.beta1), static_cast<C>(n.beta2),
          static_cast<C>(1 - n.beta2), static_cast<C>(n.step_size), static_cast<C>(n.root_correction),
          static_cast<C>(n.eps)};
}

template <bool with_top, class C>
__device__ void adam_one(C& p, C g, C& m, C& v, C& top, const AdamConstants<C>& k) {
  // Which of two products is rounded is said, for all types alike: the CPU's compiler rounds the second too, and a gradient
  // that the decay cancels shows the difference.
  const C gradient = fma(g, k.scale, k.decay * p);
  m = fma(k.beta1, m, k.one_minus_beta1 * gradient);
  v = fma(k.beta2, v, k.one_minus_beta2 * gradient * gradient);
  C second = v;
  if constexpr (with_top) second = top = top < v ? v : top;
  p = p * k.keep - k.step_size * m / (sqrt(second) / k.root_correction + k.eps);
}

// One of the buffers that a launch updates.
template <class C>
struct AdamRangeOf {
  AdamBuffersOf<C> b;
  const void* g;
  void* low;
  const double* scale;
  const AdamNumbers* numbers;
  std::int64_t n;
  AdamConstants<C> k;
  Element low_type;
  bool packed;  // aligned for packs of `width`
};

constexpr int most_ranges = 64;
constexpr std::int64_t block_elements = threads * width;  // many short blocks go faster than fewer long ones

// What a launch is given: as an argument, so that it is there before the launch and cannot change until its end.
template <class C>
struct AdamTable {
  AdamRangeOf<C> ranges[most_ranges];
  unsigned first_block[most_ranges];
  int count;
};

// Where of some ranges the one lies that this block works on: the last that begins at it or before.
__device__ int range_of_block(const unsigned (&first_block)[most_ranges], int count) {
  int at = 0;
  for (int step = most_ranges / 2; step > 0; step /= 2)
    if (at + step < count && first_block[at + step] <= blockIdx.x) at += step;
  return at;
}

template <class C, class G, bool with_top>
__global__ void __launch_bounds__(threads, sizeof(C) == 4 ? 4 : 2) adam_kernel(const __grid_constant__ AdamTable<C> table) {
  wait_for_kernels_before();
  const int at = range_of_block(table.first_block, table.count);
  const AdamRangeOf<C>& r = table.ranges[at];
  AdamConstants<C> k = r.k;
  if (r.scale && isnan(*r.scale)) return;
  if (r.numbers) k = constants<C>(*r.numbers);
  if (r.scale) k.scale *= static_cast<C>(*r.scale);
  const AdamBuffersOf<C> b = r.b;
  const G* g = static_cast<const G*>(r.g);
  void* const low = r.low;
  const std::int64_t begin = (blockIdx.x - table.first_block[at]) * block_elements;
  const std::int64_t end = begin + block_elements < r.n ? begin + block_elements : r.n;
  const std::int64_t packs_end = r.packed ? end / width : begin / width;
  if (const std::int64_t i = begin / width + threadIdx.x; i < packs_end) {
    Pack<C, width> p = pack_at<C, width>(b.p, i), m = pack_at<C, width>(b.m, i), v = pack_at<C, width>(b.v, i), top{};
    if constexpr (with_top) top = pack_at<C, width>(b.top, i);
    const Pack<G, width> gradients = pack_at<G, width>(g, i);
#pragma unroll
    for (int j = 0; j < width; ++j)
      adam_one<with_top, C>(p.at[j], static_cast<C>(element(gradients, j)), m.at[j], v.at[j], top.at[j], k);
    pack_at<C, width>(b.p, i) = p;
    pack_at<C, width>(b.m, i) = m;
    pack_at<C, width>(b.v, i) = v;
    if constexpr (with_top) pack_at<C, width>(b.top, i) = top;
    if (low) store_low(low, r.low_type, i, p);
  }
  for (std::int64_t i = packs_end * width + threadIdx.x; i < end; i += threads) {
    adam_one<with_top, C>(b.p[i], static_cast<C>(load(g[i])), b.m[i], b.v[i], with_top ? b.top[i] : b.v[i], k);
    if (low) store_low(low, r.low_type, i, Pack<C, 1>{b.p[i]});
  }
}

template <class C>
struct SgdConstants {
  C scale, decay, lr, old_momentum, fresh, ahead, weight;
};

template <class C>
__host__ __device__ SgdConstants<C> constants(const SgdNumbers& n) {
  return {static_cast<C>(n.scale), static_cast<C>(n.decay), static_cast<C>(n.lr),    static_cast<C>(n.old_momentum),
          static_cast<C>(n.fresh), static_cast<C>(n.ahead), static_cast<C>(n.weight)};
}

template <class C, class G>
__global__ void sgd_kernel(C* p, const G* g, C* momentum, void* low, Element low_type, const double* scale,
                           const SgdNumbers* numbers, std::int64_t n, SgdConstants<C> k) {
  wait_for_kernels_before();
  if (scale && isnan(*scale)) return;
  if (numbers) k = constants<C>(*numbers);
  if (scale) k.scale *= static_cast<C>(*scale);
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
    const C gradient = static_cast<C>(load(g[i])) * k.scale + k.decay * p[i];
    C direction = gradient;
    if (momentum) {
      // Not read at the first step, when it may hold anything.
      const C moved = (k.old_momentum == C(0) ? C(0) : k.old_momentum * momentum[i]) + k.fresh * gradient;
      momentum[i] = moved;
      direction = k.ahead * gradient + k.weight * moved;
    }
    p[i] -= k.lr * direction;
    if (low) store_low(low, low_type, i, Pack<C, 1>{p[i]});
  }
}

template <int count>
__device__ double sum_of_block(double value) {
  __shared__ double sums[count];
  sums[threadIdx.x] = value;
  for (int half = count / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

constexpr std::int64_t squares_of_block = 65536;  // elements
template <class T>
struct SquaresTable {
  const T* data[most_ranges];
  std::int64_t elements[most_ranges];
  unsigned first_block[most_ranges];
  int count;
};

// Packs, then the rest one by one.
template <class T>
__global__ void __launch_bounds__(threads) squares_kernel(const __grid_constant__ SquaresTable<T> table, double* sums) {
  wait_for_kernels_before();
  constexpr int wide = full_width<T>;
  const int at = range_of_block(table.first_block, table.count);
  const std::int64_t begin = (blockIdx.x - table.first_block[at]) * squares_of_block;
  const T* data = table.data[at] + begin;
  const auto n = static_cast<int>(min(squares_of_block, table.elements[at] - begin));
  const int packs = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 ? n / wide : 0;
  double sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, wide> values = pack_at<T, wide>(data, i);
#pragma unroll
    for (int j = 0; j < wide; ++j) {
      const double value = load(values.at[j]);
      sum += value * value;
    }
  }
  for (int i = packs * wide + static_cast<int>(threadIdx.x); i < n; i += threads) {
    const double value = load(data[i]);
    sum += value * value;
  }
  sum = sum_of_block<threads>(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

constexpr int sum_threads = 1024;
__global__ void __launch_bounds__(sum_threads) sum_kernel(const double* sums, std::int64_t n, double* result) {
  wait_for_kernels_before();
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < n; i += sum_threads) sum += sums[i];
  sum = sum_of_block<sum_threads>(sum);
  if (threadIdx.x == 0) *result = sum;
}

std::int64_t square_blocks(std::int64_t elements) { return (elements + squares_of_block - 1) / squares_of_block; }

int blocks_for(std::int64_t work) {
  return static_cast<int>(std::min<std::int64_t>(std::max<std::int64_t>((work + threads - 1) / threads, 1), 8192));
}

template <class Body>
void with_types(const StepMemory& memory, const Body& body) {
  with_type(memory.gradient, [&](auto g) {
    if (memory.compute == Element::f64)
      body(double{}, g);
    else
      body(float{}, g);
  });
}

}  // namespace

void launch_adam(const std::vector<AdamRange>& ranges, cudaStream_t stream) {
  for (std::size_t next = 0; next < ranges.size();) {
    const StepMemory& leading = ranges[next].memory;
    with_types(leading, [&](auto c, auto t) {
      using C = decltype(c);
      using G = decltype(t);
      const bool with_top = ranges[next].state.max_exp_avg_sq != nullptr;
      AdamTable<C> table{};
      unsigned blocks = 0;
      for (; next < ranges.size() && table.count < most_ranges; ++next) {
        const auto& [memory, state, numbers] = ranges[next];
        if (memory.compute != leading.compute || memory.gradient != leading.gradient ||
            (state.max_exp_avg_sq != nullptr) != with_top)
          break;
        const AdamBuffersOf<C> b{static_cast<C*>(memory.parameters), static_cast<C*>(state.exp_avg),
                                 static_cast<C*>(state.exp_avg_sq), static_cast<C*>(state.max_exp_avg_sq)};
        const bool packed = aligned({b.p, b.m, b.v, b.top}, sizeof(Pack<C, width>)) &&
                            aligned({memory.gradients}, sizeof(Pack<G, width>)) &&
                            aligned({memory.low_precision}, width * size_of(memory.low));
        table.first_block[table.count] = blocks;
        table.ranges[table.count++] = {b,
                                       memory.gradients,
                                       memory.low_precision,
                                       memory.scale,
                                       static_cast<const AdamNumbers*>(memory.numbers),
                                       memory.elements,
                                       constants<C>(numbers),
                                       memory.low,
                                       packed};
        blocks += static_cast<unsigned>((memory.elements + block_elements - 1) / block_elements);
      }
      if (blocks > 0)
        launch(with_top ? adam_kernel<C, G, true> : adam_kernel<C, G, false>, {blocks, threads}, stream, table);
    });
  }
}

void launch_sgd(const StepMemory& memory, void* momentum, const SgdNumbers& numbers, cudaStream_t stream) {
  with_types(memory, [&](auto c, auto t) {
    using C = decltype(c);
    using G = decltype(t);
    launch(sgd_kernel<C, G>, {blocks_for(memory.elements), threads}, stream, static_cast<C*>(memory.parameters),
           static_cast<const G*>(memory.gradients), static_cast<C*>(momentum), memory.low_precision, memory.low,
           memory.scale, static_cast<const SgdNumbers*>(memory.numbers), memory.elements, constants<C>(numbers));
  });
}

std::int64_t sum_of_squares_scratch(const std::vector<SquaresRange>& ranges) {
  std::int64_t blocks = 0;
  for (const SquaresRange& range : ranges) blocks += square_blocks(range.elements);
  return blocks;
}

void launch_sum_of_squares(const std::vector<SquaresRange>& ranges, double* scratch, double* result, cudaStream_t stream) {
  std::int64_t all = 0;  // blocks that have been launched
  for (std::size_t next = 0; next < ranges.size();) {
    const Element type = ranges[next].type;
    with_type(type, [&](auto t) {
      using T = decltype(t);
      SquaresTable<T> table{};
      unsigned blocks = 0;
      for (; next < ranges.size() && table.count < most_ranges && ranges[next].type == type; ++next) {
        if (ranges[next].elements == 0) continue;
        table.data[table.count] = static_cast<const T*>(ranges[next].data);
        table.elements[table.count] = ranges[next].elements;
        table.first_block[table.count++] = blocks;
        blocks += static_cast<unsigned>(square_blocks(ranges[next].elements));
      }
      if (blocks > 0) launch(squares_kernel<T>, {blocks, threads}, stream, table, scratch + all);
      all += blocks;
    });
  }
  launch(sum_kernel, {1, sum_threads}, stream, scratch, all, result);
}

}  // namespace bonfire::cuda
