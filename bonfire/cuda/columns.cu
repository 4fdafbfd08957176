#include "bonfire/cuda/columns.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/launch.cuh"
#include "bonfire/cuda/parts.cuh"

namespace bonfire::cuda {
namespace {

constexpr int lanes = 32, groups = 16;  // of a block: a group has every sixteenth row, a lane one pack of its columns

enum class Sweep { sums, gelu, gelu_again, merge };
template <Sweep sweep>
constexpr bool is_gelu = sweep == Sweep::gelu || sweep == Sweep::gelu_again;

// Rows that a thread reads before it works on them, and blocks for each multiprocessor of a large GPU: passes that also
// write go faster in many short blocks, and one that does not in more than run at a time, or it takes twice as long where
// others have some of the multiprocessors.
template <Sweep sweep>
constexpr int at_once = sweep == Sweep::sums ? 8
                        : is_gelu<sweep>     ? 2
                                             : 4;
template <Sweep sweep>
constexpr int blocks_for_each = sweep == Sweep::sums ? 8 : 16;

template <class T>
struct Columns {
  const T* x;
  T *d_out, *result;
  compute_t<T>* parts;
  std::int64_t rows, columns, stride, rows_of_part;
  HeadsMemory q, k, v;  // of a merge
  std::int64_t sequence, head_dim;
};

template <class T, int width, Sweep sweep>
__global__ void __launch_bounds__(lanes* groups, 2) columns_kernel(Columns<T> a) {
  wait_for_kernels_before();
  using C = compute_t<T>;
  __shared__ C shared[groups][lanes * width + 1];
  const std::int64_t pack = static_cast<std::int64_t>(blockIdx.x) * lanes + threadIdx.x;
  const std::int64_t begin = blockIdx.y * a.rows_of_part, end = min(a.rows, begin + a.rows_of_part);
  C sums[width] = {};
  if (pack * width < a.columns) {
    HeadsMemory part{};
    const T* from = nullptr;  // this thread's columns of the part
    if constexpr (sweep == Sweep::merge) {
      const std::int64_t head = pack * width / a.head_dim;
      const bool in_q = head < a.q.heads, in_k = !in_q && head < a.q.heads + a.k.heads;
      part = in_q ? a.q : in_k ? a.k : a.v;
      const std::int64_t own = in_q ? head : in_k ? head - a.q.heads : head - a.q.heads - a.k.heads;
      from = static_cast<const T*>(part.data) + own * part.stride_head + pack * width - head * a.head_dim;
    }
    const auto read = [&](std::int64_t row) {
      if constexpr (sweep == Sweep::merge) {
        const unsigned batch = static_cast<unsigned>(row) / static_cast<unsigned>(a.sequence);
        const std::int64_t position = row - batch * a.sequence;
        return read_once<T, width>(from + batch * part.stride_batch + position * part.stride_sequence, 0);
      } else {
        return pack_at<T, width>(a.x + row * a.stride, pack);
      }
    };
    const auto work = [&](std::int64_t row, const Pack<T, width>& x, const Pack<T, width>& d) {
      if constexpr (is_gelu<sweep>) {
        Pack<T, width> out, dx;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const Gelu<T> at(element(x, j));
          out.at[j] = store<T>(at.value);
          dx.at[j] = store<T>(element(d, j) * at.slope);
          sums[j] += element(dx, j);
        }
        if constexpr (sweep == Sweep::gelu_again) pack_at<T, width>(a.d_out + row * a.columns, pack) = out;
        pack_at<T, width>(a.result + row * a.columns, pack) = dx;
      } else {
#pragma unroll
        for (int j = 0; j < width; ++j) sums[j] += element(x, j);
        if constexpr (sweep == Sweep::merge) pack_at<T, width>(a.result + row * a.columns, pack) = x;
      }
    };
    constexpr int many = at_once<sweep>;
    std::int64_t row = begin + threadIdx.y;
    for (; row + (many - 1) * groups < end; row += many * groups) {
      Pack<T, width> x[many], d[many];
#pragma unroll
      for (int r = 0; r < many; ++r) {
        x[r] = read(row + r * groups);
        if constexpr (is_gelu<sweep>) d[r] = pack_at<T, width>(a.d_out + (row + r * groups) * a.columns, pack);
      }
#pragma unroll
      for (int r = 0; r < many; ++r) work(row + r * groups, x[r], d[r]);
    }
    for (; row < end; row += groups) {
      Pack<T, width> d{};
      if constexpr (is_gelu<sweep>) d = pack_at<T, width>(a.d_out + row * a.columns, pack);
      work(row, read(row), d);
    }
  }
#pragma unroll
  for (int j = 0; j < width; ++j) shared[threadIdx.y][threadIdx.x * width + j] = sums[j];
  __syncthreads();
  for (int i = threadIdx.y * lanes + threadIdx.x; i < lanes * width; i += lanes * groups) {
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * lanes * width + i;
    if (column >= a.columns) continue;
    C sum = 0;
    for (int group = 0; group < groups; ++group) sum += shared[group][i];
    a.parts[blockIdx.y * a.columns + column] = sum;
  }
}

std::int64_t parts_of(std::int64_t rows, std::int64_t columns, int blocks) {
  // Tiles as wide as those of the narrowest elements, and 64 rows for each part at least.
  const std::int64_t tiles = std::max<std::int64_t>(1, (columns + 255) / 256);
  return std::clamp<std::int64_t>((rows + 63) / 64, 1, std::max<std::int64_t>(1, 132 * blocks / tiles));
}

struct Parts {
  std::int64_t count, rows_of_each;
};
template <Sweep sweep>
Parts cut(std::int64_t rows, std::int64_t columns) {
  const auto above = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  std::int64_t each = above(rows, parts_of(rows, columns, blocks_for_each<sweep>));
  // Whole rounds of a thread's rows: what is left is read one by one.
  constexpr std::int64_t round = at_once<sweep> * groups;
  if (sweep == Sweep::sums && each > round) each = above(each, round) * round;
  return {std::max<std::int64_t>(1, above(rows, std::max<std::int64_t>(1, each))), each};
}

template <Sweep sweep>
void run_sweep(const ColumnsMemory& memory, const QkvMemory& qkv, cudaStream_t stream) {
  if (memory.columns == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    using C = compute_t<T>;
    const Parts cuts = cut<sweep>(memory.rows, memory.columns);
    const Columns<T> a{static_cast<const T*>(memory.x),
                       static_cast<T*>(memory.d_out),
                       static_cast<T*>(memory.result),
                       static_cast<C*>(memory.parts),
                       memory.rows,
                       memory.columns,
                       memory.stride,
                       cuts.rows_of_each,
                       qkv.parts[0],
                       qkv.parts[1],
                       qkv.parts[2],
                       qkv.sequence,
                       qkv.head_dim};
    const auto run = [&](auto packed) {
      constexpr int width = decltype(packed)::value ? full_width<T> : 1;
      const std::int64_t tile = lanes * width;
      const dim3 grid(static_cast<unsigned>((memory.columns + tile - 1) / tile), static_cast<unsigned>(cuts.count));
      launch(columns_kernel<T, width, sweep>, {grid, dim3(lanes, groups)}, stream, a);
    };
    constexpr int wide = full_width<T>;
    bool packed =
        memory.columns % wide == 0 && memory.stride % wide == 0 && aligned({memory.x, memory.d_out, memory.result}, 16);
    if constexpr (sweep == Sweep::merge) {
      packed = packed && qkv.head_dim % wide == 0;
      for (const HeadsMemory& part : qkv.parts)
        packed = packed && aligned({part.data}, 16) && part.stride_batch % wide == 0 && part.stride_head % wide == 0 &&
                 part.stride_sequence % wide == 0;
    }
    packed ? run(std::true_type{}) : run(std::false_type{});
    sum_parts<C>(static_cast<const C*>(memory.parts), {{static_cast<C*>(memory.sums), nullptr, nullptr}}, cuts.count,
                 memory.columns, stream);
  });
}

}  // namespace

std::int64_t most_column_parts(std::int64_t rows, std::int64_t columns) { return parts_of(rows, columns, 16); }

void launch_column_sums(const ColumnsMemory& memory, cudaStream_t stream) { run_sweep<Sweep::sums>(memory, {}, stream); }
void launch_gelu_backward_sums(const ColumnsMemory& memory, cudaStream_t stream) {
  memory.again ? run_sweep<Sweep::gelu_again>(memory, {}, stream) : run_sweep<Sweep::gelu>(memory, {}, stream);
}
void launch_merge_qkv_sums(const QkvMemory& qkv, const ColumnsMemory& memory, cudaStream_t stream) {
  run_sweep<Sweep::merge>(memory, qkv, stream);
}

}  // namespace bonfire::cuda
