#include "bonfire/cuda/qkv.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int threads = 128;
// Of a row: a thread goes on to the head so many after its own, with the same angles.
template <bool merge>
constexpr int heads_at_once = merge ? 16 : 20;

template <class T>
struct Heads {
  T* data;
  int heads;
  std::int64_t stride_batch, stride_head, stride_sequence;
};

template <class T>
struct Qkv {
  T* packed;
  Heads<T> q, k, v;
  const compute_t<T>*cosine, *sine;
  std::int64_t rows, sequence;
  int head_dim, all_heads, moved_heads;
};

// A thread has one pack of a head and, where `paired`, the one half a head further, with which it turns.
template <class T, int width, bool paired, bool turns, bool merge>
__global__ void __launch_bounds__(threads) qkv_kernel(Qkv<T> a) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  constexpr int at_once = heads_at_once<merge>;
  const int half = a.head_dim / 2, items = (paired ? half : a.head_dim) / width;
  // In 32 bits where that is enough: dividing in 64 takes as long as all the rest.
  std::int64_t row, batch;
  int within;
  if (a.rows * items * at_once <= 0x7fffffff) {
    const unsigned at = blockIdx.x * threads + threadIdx.x, own = at / (items * at_once);
    row = own;
    within = static_cast<int>(at - own * (items * at_once));
    batch = own / static_cast<unsigned>(a.sequence);
  } else {
    const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
    row = at / (items * at_once);
    within = static_cast<int>(at - row * (items * at_once));
    batch = row / a.sequence;
  }
  if (row >= a.rows) return;
  const int first = within / items, item = within - first * items;
  const std::int64_t position = row - batch * a.sequence;
  Pack<C, width> cosine{}, sine{};
  if constexpr (turns) {
    cosine = pack_at<C, width>(a.cosine + position * half, item);
    sine = pack_at<C, width>(a.sine + position * half, item);
  }
  for (int head = first; head < a.moved_heads; head += at_once) {
    const bool in_q = head < a.q.heads, in_k = !in_q && head < a.q.heads + a.k.heads;
    const Heads<T>& part = in_q ? a.q : in_k ? a.k : a.v;
    const int own = in_q ? head : in_k ? head - a.q.heads : head - a.q.heads - a.k.heads;
    T* inside = part.data + batch * part.stride_batch + own * part.stride_head + position * part.stride_sequence;
    T* outside = a.packed + (row * a.all_heads + head) * a.head_dim;
    const T* from = merge ? inside : outside;
    T* to = merge ? outside : inside;
    Pack<T, width> x = pack_at<T, width>(from, item);
    if constexpr (paired) {
      Pack<T, width> y = pack_at<T, width>(from + half, item);
      if (turns && (in_q || in_k)) {
        Pack<T, width> turned_x, turned_y;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const C u = element(x, j), w = element(y, j), c = cosine.at[j], s = merge ? -sine.at[j] : sine.at[j];
          turned_x.at[j] = store<T>(u * c - w * s);
          turned_y.at[j] = store<T>(w * c + u * s);
        }
        x = turned_x;
        y = turned_y;
      }
      pack_at<T, width>(to + half, item) = y;
    }
    pack_at<T, width>(to, item) = x;
  }
}

template <bool merge>
void move(const QkvMemory& memory, cudaStream_t stream) {
  const std::int64_t rows = memory.batch * memory.sequence;
  if (rows == 0 || memory.head_dim == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    using C = compute_t<T>;
    const auto heads = [](const HeadsMemory& part) {
      return Heads<T>{static_cast<T*>(part.data), static_cast<int>(part.heads), part.stride_batch, part.stride_head,
                      part.stride_sequence};
    };
    const auto& [q, k, v] = memory.parts;
    const Qkv<T> a{static_cast<T*>(memory.packed),
                   heads(q),
                   heads(k),
                   heads(v),
                   static_cast<const C*>(memory.cosine),
                   static_cast<const C*>(memory.sine),
                   rows,
                   memory.sequence,
                   static_cast<int>(memory.head_dim),
                   static_cast<int>(q.heads + k.heads + v.heads),
                   static_cast<int>(q.heads + k.heads + (q.data == memory.packed ? 0 : v.heads))};
    const auto run = [&](auto width, auto paired, auto turns) {
      constexpr int w = decltype(width)::value;
      const std::int64_t items = (decltype(paired)::value ? memory.head_dim / 2 : memory.head_dim) / w;
      const std::int64_t work = rows * items * heads_at_once<merge>;
      launch(qkv_kernel<T, w, decltype(paired)::value, decltype(turns)::value, merge>,
             {static_cast<unsigned>((work + threads - 1) / threads), threads}, stream, a);
    };
    constexpr int wide = full_width<T>;
    const auto steps = [&](const HeadsMemory& part) {
      return part.stride_batch % wide == 0 && part.stride_head % wide == 0 && part.stride_sequence % wide == 0;
    };
    const bool packed = memory.head_dim % (2 * wide) == 0 && steps(q) && steps(k) && steps(v) &&
                        aligned({memory.packed, q.data, k.data, v.data}, 16) &&
                        aligned({memory.cosine, memory.sine}, sizeof(C) * wide);
    using Wide = std::integral_constant<int, wide>;
    using Single = std::integral_constant<int, 1>;
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (memory.cosine)
      packed ? run(Wide{}, yes, yes) : run(Single{}, yes, yes);
    else
      packed ? run(Wide{}, yes, no) : run(Single{}, no, no);
  });
}

}  // namespace

void launch_split_qkv(const QkvMemory& memory, cudaStream_t stream) { move<false>(memory, stream); }
void launch_merge_qkv(const QkvMemory& memory, cudaStream_t stream) { move<true>(memory, stream); }

}  // namespace bonfire::cuda
