#include "bonfire/kernels/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include <immintrin.h>

#include <ATen/Parallel.h>

#include "bonfire/base/error.h"

// The words, from the outside in. A block is what of b fits the second cache: `depth` rows and kBlockColumns columns, copied
// into panels. A panel is kWidth columns of a block; a strip is kHeight rows of a. Both are copied so that the innermost
// loop reads them from end to end. A tile is the kHeight x kWidth piece of c that a strip and a panel make: it stays in
// registers.
namespace bonfire::cpu {
namespace {

constexpr std::int64_t kHeight = 12, kWidth = 32;  // 24 accumulators, two columns of b and one of a: 27 of 32 registers
constexpr std::int64_t kDepth = 512, kBlockColumns = 384;
constexpr std::int64_t kGroup = 4;  // strips that are copied together, so that columns of a are read by whole cache lines

#define BONFIRE_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))

struct Free {
  void operator()(float* p) const { std::free(p); }
};

// Scratch memory that a thread keeps: fresh pages for every product would cost more than the copies.
float* scratch(std::unique_ptr<float, Free>& kept, std::int64_t elements) {
  if (!kept) kept.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(elements) * sizeof(float))));
  return kept.get();
}

// out[k * width + r] = in[r * stride + k] for `count` rows of `width`, zeros for the others; the rows are contiguous.
template <std::int64_t width>
BONFIRE_AVX512 void pack_turned(const float* in, std::int64_t stride, std::int64_t count, std::int64_t depth, float* out) {
  std::int64_t k = 0;
  if (count == width) {
    for (; k + 4 <= depth; k += 4)
      for (std::int64_t r = 0; r < width; r += 4) {
        const float* from = in + r * stride + k;
        __m128 x0 = _mm_loadu_ps(from), x1 = _mm_loadu_ps(from + stride), x2 = _mm_loadu_ps(from + 2 * stride),
               x3 = _mm_loadu_ps(from + 3 * stride);
        _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
        float* to = out + k * width + r;
        _mm_storeu_ps(to, x0);
        _mm_storeu_ps(to + width, x1);
        _mm_storeu_ps(to + 2 * width, x2);
        _mm_storeu_ps(to + 3 * width, x3);
      }
  }
  for (; k < depth; ++k)
    for (std::int64_t r = 0; r < width; ++r) out[k * width + r] = r < count ? in[r * stride + k] : 0.0f;
}

// out[k * width + r] = in[k * stride + r].
template <std::int64_t width>
BONFIRE_AVX512 void pack_straight(const float* in, std::int64_t stride, std::int64_t count, std::int64_t depth, float* out) {
  if (count == width) {
    for (std::int64_t k = 0; k < depth; ++k)
      for (std::int64_t r = 0; r < width; r += 4) _mm_storeu_ps(out + k * width + r, _mm_loadu_ps(in + k * stride + r));
    return;
  }
  for (std::int64_t k = 0; k < depth; ++k)
    for (std::int64_t r = 0; r < width; ++r) out[k * width + r] = r < count ? in[k * stride + r] : 0.0f;
}

struct Tile {
  float* c;
  std::int64_t stride, rows, columns;
  const float* addend;  // nullptr: none
  std::int64_t addend_stride;
};

BONFIRE_AVX512 void make_tile(const float* strip, const float* panel, std::int64_t depth, const Tile& tile) {
  __m512 sum[kHeight][2];
#pragma GCC unroll 12
  for (int r = 0; r < kHeight; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (std::int64_t k = 0; k < depth; ++k, strip += kHeight, panel += kWidth) {
    const __m512 b0 = _mm512_loadu_ps(panel), b1 = _mm512_loadu_ps(panel + 16);
#pragma GCC unroll 12
    for (int r = 0; r < kHeight; ++r) {
      const __m512 a = _mm512_set1_ps(strip[r]);
      sum[r][0] = _mm512_fmadd_ps(a, b0, sum[r][0]);
      sum[r][1] = _mm512_fmadd_ps(a, b1, sum[r][1]);
    }
  }
  const auto mask = [](std::int64_t columns) -> __mmask16 {
    return static_cast<__mmask16>(columns >= 16 ? 0xffff : (1u << std::max<std::int64_t>(0, columns)) - 1);
  };
  const __mmask16 m0 = mask(tile.columns), m1 = mask(tile.columns - 16);
#pragma GCC unroll 12
  for (int r = 0; r < kHeight; ++r) {
    if (r >= tile.rows) break;
    float* c = tile.c + r * tile.stride;
    if (tile.addend) {
      const float* addend = tile.addend + r * tile.addend_stride;
      sum[r][0] = _mm512_add_ps(sum[r][0], _mm512_maskz_loadu_ps(m0, addend));
      sum[r][1] = _mm512_add_ps(sum[r][1], _mm512_maskz_loadu_ps(m1, addend + 16));
    }
    _mm512_mask_storeu_ps(c, m0, sum[r][0]);
    _mm512_mask_storeu_ps(c + 16, m1, sum[r][1]);
  }
}

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
  static thread_local std::unique_ptr<float, Free> kept_block;
  float* const block = scratch(kept_block, kDepth * kBlockColumns);
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
        static thread_local std::unique_ptr<float, Free> kept_strips;
        float* const packed = scratch(kept_strips, kDepth * kHeight * kGroup);
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
