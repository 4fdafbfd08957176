#pragma once

#include <cstddef>

// What kernels ask of the GPU that they are launched on: the one place where they do.
namespace bonfire::cuda {

struct Gpu {
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int block_shared = 0;  // bytes of shared memory that a block may have, its own and what it is launched with
};
// The current one.
Gpu current_gpu();

// For measurements: products leave so many multiprocessors to others, on all GPUs of this process; 0: none.
void leave_multiprocessors(int to_others);
// Of the current GPU, those that are left then; 0 where nobody takes any.
int multiprocessors_beside_others();

// Lets `kernel` be launched with so many bytes of shared memory beside its own. Throws Error where the GPU has less for a
// block.
void allow_shared(const void* kernel, std::size_t bytes);

// For tests: no GPU has more than so many bytes of shared memory for a block; 0: all that it has.
void limit_shared_memory(int bytes);

}  // namespace bonfire::cuda
