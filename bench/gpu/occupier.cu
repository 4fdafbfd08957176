#include "bench/gpu/occupier.h"

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

struct OccupierFlags {
  volatile int there, over;
};

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// All of its multiprocessor's shared memory is a block's, so that nobody else's fits beside it.
__global__ void occupy_kernel(OccupierFlags* flags) {
  atomicAdd_system(const_cast<int*>(&flags->there), 1);
  constexpr unsigned long long most = 8'000'000'000ull;  // nanoseconds: nobody waits for ever
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (!flags->over && now - begin < most);
}

}  // namespace

Occupier::Occupier(int multiprocessors) {
  if (multiprocessors == 0) return;
  int device = 0, shared = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  check(cudaHostAlloc(reinterpret_cast<void**>(&flags_), sizeof(OccupierFlags), cudaHostAllocMapped), "cudaHostAlloc");
  flags_->there = flags_->over = 0;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_ = stream;
  check(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  occupy_kernel<<<static_cast<unsigned>(multiprocessors), 1, static_cast<std::size_t>(shared), stream>>>(flags_);
  check(cudaGetLastError(), "occupy_kernel");
  while (flags_->there < multiprocessors)
    check(cudaStreamQuery(stream) == cudaSuccess ? cudaErrorUnknown : cudaSuccess, "occupy_kernel");
}

Occupier::~Occupier() {
  if (!flags_) return;
  flags_->over = 1;
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream_)), "cudaStreamSynchronize");
  check(cudaStreamDestroy(static_cast<cudaStream_t>(stream_)), "cudaStreamDestroy");
  check(cudaFreeHost(flags_), "cudaFreeHost");
}
