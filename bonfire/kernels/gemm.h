#pragma once

#include <cstdint>

#include "bonfire/base/api.h"

namespace bonfire::cpu {

// c [rows, columns] = a [rows, depth] b [depth, columns] + addend [rows, columns], in fp32. Every matrix has its own
// strides; one stride of `a` and of `b`, and the column stride of c and the addend, is 1. The addend may be c itself, and a
// row stride of 0 adds one row to all.
struct Gemm {
  std::int64_t rows = 0, columns = 0, depth = 0;
  const float* a = nullptr;
  std::int64_t a_row = 0, a_column = 1;
  const float* b = nullptr;
  std::int64_t b_row = 0, b_column = 1;
  float* c = nullptr;
  std::int64_t c_row = 0;
  const float* addend = nullptr;
  std::int64_t addend_row = 0;
};

// Whether this machine is one where `multiply` beats torch's library: AVX-512 that the library does not use, because it was
// not made by the library's maker.
BONFIRE_API bool prefers_own_gemm();

// REQUIRES: can_multiply(), a depth of at least 1. The result does not depend on the number of threads.
BONFIRE_API void multiply(const Gemm& gemm);
BONFIRE_API bool can_multiply();

}  // namespace bonfire::cpu
