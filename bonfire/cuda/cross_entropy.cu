#include "bonfire/cuda/cross_entropy.h"

#include "bonfire/cuda/device.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 1024;

// The largest of some numbers, and the sum of their exponentials relative to it.
template <class C>
struct Softmax {
  C top, sum;
};

template <class T>
__device__ void include(Softmax<compute_t<T>>& a, const Softmax<compute_t<T>>& b) {
  using C = compute_t<T>;
  const C top = a.top < b.top ? b.top : a.top;
  // Equal tops first: both may be minus infinity, whose difference is no number.
  const C keep = a.top == top ? C(1) : exponential<T>(a.top - top), add = b.top == top ? C(1) : exponential<T>(b.top - top);
  a = {top, a.sum * keep + b.sum * add};
}

template <class T>
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
  own = {tops[lane], sums[lane]};
  of_warp();
  return own;
}

template <class T, int width, bool gradient>
__global__ void __launch_bounds__(threads)
    cross_entropy_kernel(T* logits, const std::int64_t* target, double* losses, std::int64_t classes, std::int64_t ignore) {
  using C = compute_t<T>;
  const std::int64_t row = blockIdx.x, wanted = target[row], packs = classes / width;
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
#pragma unroll 2
  for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
    const Pack<T, width> x = pack_at<T, width>(at, i);
    C top = load(x.at[0]);
#pragma unroll
    for (int j = 1; j < width; ++j) top = top < load(x.at[j]) ? load(x.at[j]) : top;
    if (own.top < top) {
      own.sum *= exponential<T>(own.top - top);
      own.top = top;
    }
    if (own.top == -INFINITY) continue;
#pragma unroll
    for (int j = 0; j < width; ++j) own.sum += exponential<T>(load(x.at[j]) - own.top);
  }
  const Softmax<C> all = softmax_of_block<T>(own);
  if (threadIdx.x == 0)
    losses[row] = log(static_cast<double>(all.sum)) + static_cast<double>(all.top) - static_cast<double>(chosen);
  if constexpr (gradient) {
    const C scale = C(1) / all.sum;
#pragma unroll 2
    for (std::int64_t i = threadIdx.x; i < packs; i += threads) {
      Pack<T, width> x = pack_at<T, width>(at, i);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        C p = exponential<T>(load(x.at[j]) - all.top) * scale;
        if (i * width + j == wanted) p -= C(1);
        x.at[j] = store<T>(p);
      }
      pack_at<T, width>(at, i) = x;
    }
  }
}

}  // namespace

void launch_cross_entropy(const CrossEntropyMemory& memory, cudaStream_t stream) {
  if (memory.rows == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto width, auto gradient) {
      cross_entropy_kernel<T, decltype(width)::value, decltype(gradient)::value>
          <<<static_cast<unsigned>(memory.rows), threads, 0, stream>>>(static_cast<T*>(memory.logits), memory.target,
                                                                       memory.losses, memory.classes, memory.ignore);
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
