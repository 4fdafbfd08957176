#pragma once

#include <ATen/core/Tensor.h>

// Products by cuBLASLt, one call each.
namespace bonfire::cuda {

struct Matmul {
  at::Tensor out;       // [rows, columns], lies by rows
  at::Tensor a, b;      // [rows, depth] and [depth, columns], of one type or both of eight bits
  at::Tensor bias{};    // [columns], of the output's type
  at::Tensor addend{};  // of the output's shape and type, by rows; may be the output
  // What elements of eight bits are multiplied by: one number each, or one for each row of `a` and column of `b`. fp32.
  at::Tensor scale_a{}, scale_b{};
  // For elements of eight bits: whether sums may be kept in fewer bits than fp32 has, which is faster.
  bool short_sums = false;
};

// out = a b + bias + addend. False where cuBLASLt has no way to do it: nothing was written then.
//
// Of the ways that cuBLASLt offers, the first time a large product is made the fastest is taken, by trying, among those that
// give the bits of the one it would choose itself: time decides about speed alone. Where an operand repeats itself (zeros,
// most of all), random numbers stand in for it while ways are tried. Trying waits for the device.
bool multiply(const Matmul& product);

}  // namespace bonfire::cuda
