#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include <immintrin.h>

// The innermost part of fp32 products with AVX-512. A strip is kHeight rows of the left matrix, a panel kWidth columns of
// the right one; both are copied so that the loop reads them from end to end. A tile is the kHeight x kWidth piece of the
// result that they make: it stays in registers.
namespace bonfire::cpu {

#define BONFIRE_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))

constexpr std::int64_t kHeight = 12, kWidth = 32;  // 24 accumulators, two columns of b and one of a: 27 of 32 registers

// Scratch memory that a thread keeps: fresh pages for every product would cost more than the copies.
class Scratch {
 public:
  // At least that many elements, aligned to a cache line; what was in them is lost.
  float* get(std::int64_t elements) {
    if (elements > size_) {
      size_ = (elements + 15) / 16 * 16;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(size_) * sizeof(float))));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  std::int64_t size_ = 0;
};

// out[k * width + r] = in[r * stride + k] for `count` rows of `width`, zeros for the others; the rows are contiguous.
template <std::int64_t width>
BONFIRE_AVX512 inline void pack_turned(const float* in, std::int64_t stride, std::int64_t count, std::int64_t depth,
                                       float* out) {
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
BONFIRE_AVX512 inline void pack_straight(const float* in, std::int64_t stride, std::int64_t count, std::int64_t depth,
                                         float* out) {
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

BONFIRE_AVX512 inline void make_tile(const float* strip, const float* panel, std::int64_t depth, const Tile& tile) {
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

}  // namespace bonfire::cpu
