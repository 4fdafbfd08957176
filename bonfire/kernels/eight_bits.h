#pragma once

#include <ATen/core/Tensor.h>

// How numbers are rounded to eight bits, e5m2 where `wide_range`, otherwise e4m3: what all operators for it share where a
// device has no kernels. bonfire/cuda/eight_bits.cuh is the same arithmetic on GPUs, to the bit.
namespace bonfire {

// The largest magnitude of x, in fp32: of all elements (one element), or of each row. Those that are infinite or no number
// do not count, so that no scale that is made of it makes other elements, or those of later calls, anything but numbers.
at::Tensor largest_magnitude(const at::Tensor& x);
at::Tensor largest_magnitudes_of_rows(const at::Tensor& x);

// What elements are multiplied by so that `magnitude` becomes the largest number; 1 where nothing has a magnitude. No more
// than 2^126, whose reciprocal is a normal number: what is so small keeps fewer bits.
at::Tensor scale_for(const at::Tensor& magnitude, bool wide_range);

// x times scale, where what is too large stops at the largest number. Infinities become not-a-number: stopped, they would
// pass for numbers.
at::Tensor in_eight_bits(const at::Tensor& x, const at::Tensor& scale, bool wide_range);

}  // namespace bonfire
