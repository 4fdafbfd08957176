#include "bonfire/cuda/cross_entropy.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

// Exponents are of two: one multiplication and addition brings an element there.

// The largest of some numbers times log2e, and the sum of their exponentials relative to it.
template <class C>
struct Softmax {
  C top, sum;
};

template <class T>
__device__ void include(Softmax<compute_t<T>>& a, const Softmax<compute_t<T>>& b) {
  using C = compute_t<T>;
  const C top = a.top < b.top ? b.top : a.top;
  // Equal tops first: both may be minus infinity, whose difference is no number.
  const C keep = a.top == top ? C(1) : power_of_two<T>(a.top - top),
          add = b.top == top ? C(1) : power_of_two<T>(b.top - top);
  a = {top, a.sum * keep + b.sum * add};
}

template <class T, int threads>
__device__ Softmax<compute_t<T>> softmax_of_block(Softmax<compute_t<T>> own) {
  using C = compute_t<T>;
  __shared__ C tops[32], sums[32];
  const auto of_warp = [&] {
    for (int distance = 16; distance > 0; distance /= 2) {
      const C top = __shfl_xor_sync(0xffffffffu, own.top, distance), sum = __shfl_xor_sync(0xffffffffu, own.sum, distance);
      include<T>(own, {top, sum});
    }
  };
  of_warp();
  if (threadIdx.x % 32 == 0) {
    tops[threadIdx.x / 32] = own.top;
    sums[threadIdx.x / 32] = own.sum;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  own = lane < threads / 32 ? Softmax<C>{tops[lane], sums[lane]} : Softmax<C>{-INFINITY, 0};
  of_warp();
  return own;
}

// The first `stashed` packs of a row stay in shared memory between the two passes; every thread reads what it put there.
// Two blocks of 512 threads share a multiprocessor, or one of 1024 has it for itself.
template <class T, int width, bool gradient, int threads>
__global__ void __launch_bounds__(threads, 1024 / threads)
    cross_entropy_kernel(T* logits, const std::int64_t* target, double* losses, std::int64_t classes, std::int64_t ignore,
                         int stashed) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  extern __shared__ double2 dynamic[];  // 16 bytes aligned
  auto* stash = reinterpret_cast<Pack<T, width>*>(dynamic);
  const std::int64_t row = blockIdx.x, wanted = target[row];
  const int packs = static_cast<int>(classes / width);
  T* at = logits + row * classes;
  if (wanted == ignore) {
    if (threadIdx.x == 0) losses[row] = 0;
    if constexpr (gradient)
      for (std::int64_t i = threadIdx.x; i < classes; i += threads) at[i] = store<T>(0);
    return;
  }
  if (wanted < 0 || wanted >= classes) {
    // Found without asking the host: the loss of the step is no number, and whoever reads it stops.
    if (threadIdx.x == 0) losses[row] = static_cast<double>(NAN);
    return;
  }
  const C chosen = load(at[wanted]);
  Softmax<C> own{-INFINITY, 0};
#pragma unroll 4
  for (int i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> x = pack_at<T, width>(at, i);
    if (gradient && i < stashed) stash[i] = x;
    C top = element(x, 0);
#pragma unroll
    for (int j = 1; j < width; ++j) top = max(top, element(x, j));
    top *= log2e<C>;
    if (own.top < top) {
      own.sum *= power_of_two<T>(own.top - top);
      own.top = top;
    }
    if (own.top == -INFINITY) continue;
#pragma unroll
    for (int j = 0; j < width; ++j) own.sum += power_of_two<T>(fma(element(x, j), log2e<C>, -own.top));
  }
  const Softmax<C> all = softmax_of_block<T, threads>(own);
  if (threadIdx.x == 0)
    losses[row] =
        (log2(static_cast<double>(all.sum)) + static_cast<double>(all.top)) / log2e<double> - static_cast<double>(chosen);
  if constexpr (gradient) {
    // One exponential does it all where its rounding does not show; otherwise the sum divides by itself.
    constexpr bool folded = sizeof(T) == 2;
    const C shift = folded ? -all.top - log2(all.sum) : -all.top, scale = folded ? C(1) : C(1) / all.sum;
    const auto softmax = [&](C x) { return power_of_two<T>(fma(x, log2e<C>, shift)) * scale; };
#pragma unroll 4
    for (int i = threadIdx.x; i < packs; i += threads) {
      const Pack<T, width> x = i < stashed ? stash[i] : pack_at<T, width>(at, i);
      Pack<T, width> out;
#pragma unroll
      for (int j = 0; j < width; ++j) out.at[j] = store<T>(softmax(element(x, j)));
      pack_at<T, width>(at, i) = out;
    }
    __syncthreads();
    if (threadIdx.x == 0) at[wanted] = store<T>(softmax(chosen) - C(1));
  }
}

}  // namespace

void launch_cross_entropy(const CrossEntropyMemory& memory, cudaStream_t stream) {
  if (memory.rows == 0) return;
  if (memory.gradient && launch_streamed_cross_entropy(memory, stream)) return;
  const int most_shared = current_gpu().block_shared;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run_with = [&](auto width, auto gradient, auto threads) {
      using Packed = Pack<T, decltype(width)::value>;
      constexpr int size = static_cast<int>(sizeof(Packed)), reserved = 1024;  // for the sums
      const std::int64_t packs = memory.classes / decltype(width)::value;
      const auto stashed = decltype(gradient)::value ? std::min<std::int64_t>(packs, (most_shared - reserved) / size) : 0;
      const auto kernel =
          cross_entropy_kernel<T, decltype(width)::value, decltype(gradient)::value, decltype(threads)::value>;
      launch(kernel,
             {static_cast<unsigned>(memory.rows), decltype(threads)::value, static_cast<std::size_t>(stashed) * size},
             stream, static_cast<T*>(memory.logits), memory.target, memory.losses, memory.classes, memory.ignore,
             static_cast<int>(stashed));
    };
    const auto run = [&](auto width, auto gradient) {
      const bool two_fit =
          !memory.gradient || memory.classes * static_cast<std::int64_t>(sizeof(T)) < most_shared / 2 - 2048;
      two_fit ? run_with(width, gradient, std::integral_constant<int, 512>{})
              : run_with(width, gradient, std::integral_constant<int, 1024>{});
    };
    const auto choose = [&](auto width) { memory.gradient ? run(width, std::true_type{}) : run(width, std::false_type{}); };
    constexpr int wide = full_width<T>;
    if (memory.classes % wide == 0 && aligned({memory.logits}, 16))
      choose(std::integral_constant<int, wide>{});
    else
      choose(std::integral_constant<int, 1>{});
  });
}

}  // namespace bonfire::cuda
