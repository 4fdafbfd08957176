#include "bonfire/cuda/columns.h"

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/parts.cuh"

namespace bonfire::cuda {
namespace {

constexpr int lanes = 32, groups = 8;  // of a block: a group has every eighth row, a lane one pack of its columns
constexpr int at_once = 4;             // rows that a thread reads before it works on them

template <class T>
struct Columns {
  const T* x;
  T *d_out, *result;
  compute_t<T>* parts;
  bool again;
  std::int64_t rows, columns, rows_of_part;
};

template <class T, int width, bool gelu>
__global__ void columns_kernel(Columns<T> a) {
  using C = compute_t<T>;
  __shared__ C shared[groups][lanes * width + 1];
  const std::int64_t pack = static_cast<std::int64_t>(blockIdx.x) * lanes + threadIdx.x;
  const std::int64_t begin = blockIdx.y * a.rows_of_part, end = min(a.rows, begin + a.rows_of_part);
  C sums[width] = {};
  if (pack * width < a.columns) {
    const auto work = [&](std::int64_t row, const Pack<T, width>& x, const Pack<T, width>& d) {
      if constexpr (gelu) {
        Pack<T, width> out, dx;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const Gelu<T> at(load(x.at[j]));
          out.at[j] = store<T>(at.value);
          dx.at[j] = store<T>(load(d.at[j]) * at.slope);
          sums[j] += load(dx.at[j]);
        }
        if (a.again) pack_at<T, width>(a.d_out + row * a.columns, pack) = out;
        pack_at<T, width>(a.result + row * a.columns, pack) = dx;
      } else {
#pragma unroll
        for (int j = 0; j < width; ++j) sums[j] += load(x.at[j]);
      }
    };
    std::int64_t row = begin + threadIdx.y;
    for (; row + (at_once - 1) * groups < end; row += at_once * groups) {
      Pack<T, width> x[at_once], d[at_once];
#pragma unroll
      for (int r = 0; r < at_once; ++r) {
        x[r] = pack_at<T, width>(a.x + (row + r * groups) * a.columns, pack);
        if constexpr (gelu) d[r] = pack_at<T, width>(a.d_out + (row + r * groups) * a.columns, pack);
      }
#pragma unroll
      for (int r = 0; r < at_once; ++r) work(row + r * groups, x[r], d[r]);
    }
    for (; row < end; row += groups) {
      Pack<T, width> d{};
      if constexpr (gelu) d = pack_at<T, width>(a.d_out + row * a.columns, pack);
      work(row, pack_at<T, width>(a.x + row * a.columns, pack), d);
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

template <bool gelu>
void pass(const ColumnsMemory& memory, cudaStream_t stream) {
  if (memory.columns == 0) return;
  with_type(memory.type, [&](auto t) {
    using T = decltype(t);
    const std::int64_t parts = column_parts(memory.rows, memory.columns);
    const Columns<T> a{static_cast<const T*>(memory.x),
                       static_cast<T*>(memory.d_out),
                       static_cast<T*>(memory.result),
                       static_cast<compute_t<T>*>(memory.parts),
                       memory.again,
                       memory.rows,
                       memory.columns,
                       (memory.rows + parts - 1) / parts};
    const auto run = [&](auto packed) {
      constexpr int width = decltype(packed)::value ? full_width<T> : 1;
      const std::int64_t tile = lanes * width;
      const dim3 grid(static_cast<unsigned>((memory.columns + tile - 1) / tile), static_cast<unsigned>(parts));
      columns_kernel<T, width, gelu><<<grid, dim3(lanes, groups), 0, stream>>>(a);
    };
    const bool packed = memory.columns % full_width<T> == 0 && aligned({memory.x, memory.d_out, memory.result}, 16);
    packed ? run(std::true_type{}) : run(std::false_type{});
    sum_parts<compute_t<T>>(memory.parts, memory.sums, parts, memory.columns, stream);
  });
}

}  // namespace

std::int64_t column_parts(std::int64_t rows, std::int64_t columns) {
  // As many blocks as keep a large GPU's memory busy, of 32 rows at least.
  const std::int64_t tiles = std::max<std::int64_t>(1, (columns + 255) / 256);
  return std::clamp<std::int64_t>((rows + 31) / 32, 1, std::max<std::int64_t>(1, 132 * 8 / tiles));
}

void launch_column_sums(const ColumnsMemory& memory, cudaStream_t stream) { pass<false>(memory, stream); }
void launch_gelu_backward_sums(const ColumnsMemory& memory, cudaStream_t stream) { pass<true>(memory, stream); }

}  // namespace bonfire::cuda
