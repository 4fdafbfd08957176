#include "bonfire/kernels/gemm.h"

#include <algorithm>

#include <ATen/Parallel.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/gemm_tile.h"

// A block is what of b fits the second cache: a slice of the depth and kBlockColumns columns, copied into panels.
namespace bonfire::cpu {
namespace {

constexpr std::int64_t kDepth = 512, kBlockColumns = 384;
constexpr std::int64_t kGroup = 4;  // strips that are copied together, so that columns of a are read by whole cache lines

void pack_block(const Gemm& g, std::int64_t k, std::int64_t depth, std::int64_t column, std::int64_t columns, float* out) {
  for (std::int64_t at = 0; at < columns; at += kWidth, out += depth * kWidth) {
    const std::int64_t count = std::min(kWidth, columns - at);
    const float* from = g.b + k * g.b_row + (column + at) * g.b_column;
    if (g.b_column == 1)
      pack_straight<kWidth>(from, g.b_row, count, depth, out);
    else
      pack_turned<kWidth>(from, g.b_column, count, depth, out);
  }
}

BONFIRE_AVX512 void pack_strips(const Gemm& g, std::int64_t k, std::int64_t depth, std::int64_t first, std::int64_t last,
                                float* out) {
  const std::int64_t size = depth * kHeight;
  if (g.a_column != 1 && last - first == kGroup && last * kHeight <= g.rows) {
    for (std::int64_t i = 0; i < depth; ++i) {
      const float* from = g.a + first * kHeight + (k + i) * g.a_column;
      for (std::int64_t strip = 0; strip < kGroup; ++strip)
        for (std::int64_t r = 0; r < kHeight; r += 4)
          _mm_storeu_ps(out + strip * size + i * kHeight + r, _mm_loadu_ps(from + strip * kHeight + r));
    }
    return;
  }
  for (std::int64_t strip = first; strip < last; ++strip, out += size) {
    const std::int64_t row = strip * kHeight, rows = std::min(kHeight, g.rows - row);
    const float* from = g.a + row * g.a_row + k * g.a_column;
    if (g.a_column == 1)
      pack_turned<kHeight>(from, g.a_row, rows, depth, out);
    else
      pack_straight<kHeight>(from, g.a_column, rows, depth, out);
  }
}

}  // namespace

bool can_multiply() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw");
}

bool prefers_own_gemm() {
  static const bool prefers = can_multiply() && !__builtin_cpu_is("intel");
  return prefers;
}

void multiply(const Gemm& g) {
  require(g.a_row == 1 || g.a_column == 1, "gemm: a has strides {} and {}; one must be 1", g.a_row, g.a_column);
  require(g.b_row == 1 || g.b_column == 1, "gemm: b has strides {} and {}; one must be 1", g.b_row, g.b_column);
  if (g.rows == 0 || g.columns == 0) return;
  require(g.depth > 0, "gemm: the depth is {}; it must be at least 1", g.depth);
  static thread_local Scratch kept_block;
  float* const block = kept_block.get(kDepth * kBlockColumns);
  // Slices of equal depth, so that the last one is not a sliver.
  const std::int64_t slices = (g.depth + kDepth - 1) / kDepth, slice = (g.depth + slices - 1) / slices;
  const std::int64_t strips = (g.rows + kHeight - 1) / kHeight, groups = (strips + kGroup - 1) / kGroup;
  for (std::int64_t column = 0; column < g.columns; column += kBlockColumns) {
    const std::int64_t columns = std::min(kBlockColumns, g.columns - column);
    for (std::int64_t k = 0; k < g.depth; k += slice) {
      const std::int64_t depth = std::min(slice, g.depth - k);
      // The slices after the first one add to what is there.
      const float* const addend = k ? g.c : g.addend;
      const std::int64_t addend_row = k ? g.c_row : g.addend_row;
      pack_block(g, k, depth, column, columns, block);
      at::parallel_for(0, groups, 2, [&](std::int64_t begin, std::int64_t end) {
        static thread_local Scratch kept_strips;
        float* const packed = kept_strips.get(kDepth * kHeight * kGroup);
        for (std::int64_t first = begin * kGroup; first < std::min(strips, end * kGroup); first += kGroup) {
          const std::int64_t last = std::min(strips, first + kGroup);
          pack_strips(g, k, depth, first, last, packed);
          for (std::int64_t i = first; i < last; ++i) {
            const std::int64_t row = i * kHeight, rows = std::min(kHeight, g.rows - row);
            for (std::int64_t at = 0; at < columns; at += kWidth)
              make_tile(packed + (i - first) * depth * kHeight, block + at * depth, depth,
                        {.c = g.c + row * g.c_row + column + at,
                         .stride = g.c_row,
                         .rows = rows,
                         .columns = std::min(kWidth, columns - at),
                         .addend = addend ? addend + row * addend_row + column + at : nullptr,
                         .addend_stride = addend_row});
          }
        }
      });
    }
  }
}

}  // namespace bonfire::cpu
