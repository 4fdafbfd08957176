#include "bench/gpu/occupier.h"

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

// In the GPU's own memory: sixteen blocks that look at the host's, over the bus, slow down every other kernel, some tenfold.
struct OccupierFlags {
  int there;
  volatile int over;
};

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

// All of its multiprocessor's shared memory is a block's, so that nobody else's fits beside it.
__global__ void occupy_kernel(OccupierFlags* flags) {
  atomicAdd(&flags->there, 1);
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
  check(cudaMalloc(reinterpret_cast<void**>(&flags_), sizeof(OccupierFlags)), "cudaMalloc");
  check(cudaMemset(flags_, 0, sizeof(OccupierFlags)), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  stream_ = make_stream();
  beside_ = make_stream();
  check(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  occupy_kernel<<<static_cast<unsigned>(multiprocessors), 1, static_cast<std::size_t>(shared), stream_>>>(flags_);
  check(cudaGetLastError(), "occupy_kernel");
  int there = 0;
  while (there < multiprocessors) {
    check(cudaStreamQuery(stream_) == cudaSuccess ? cudaErrorUnknown : cudaSuccess, "occupy_kernel");
    check(cudaMemcpyAsync(&there, &flags_->there, sizeof(there), cudaMemcpyDeviceToHost, beside_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(beside_), "cudaStreamSynchronize");
  }
}

Occupier::~Occupier() {
  if (!flags_) return;
  check(cudaMemsetAsync(const_cast<int*>(&flags_->over), 1, sizeof(int), beside_), "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  check(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  check(cudaStreamDestroy(beside_), "cudaStreamDestroy");
  check(cudaFree(flags_), "cudaFree");
}
