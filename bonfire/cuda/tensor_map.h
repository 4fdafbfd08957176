#pragma once

#include <cstdint>

#include <cuda.h>

namespace bonfire::cuda {

// A matrix of bf16 by rows, as the copies of hopper.cuh see it: in boxes of 64 columns. What lies outside of it reads as
// zero. REQUIRES: the address, and a row's bytes, are multiples of 16.
struct Boxes {
  const void* data = nullptr;
  std::int64_t rows = 0, columns = 0;
  int box_rows = 0;
};
CUtensorMap tensor_map(const Boxes& boxes);

// Whether the driver makes such maps.
bool has_tensor_maps();

}  // namespace bonfire::cuda
