#include "bonfire/cuda/shared_gpu.h"

#include <cstdlib>
#include <string>

#include <c10/cuda/CUDAException.h>
#include <fmt/format.h>

#include "bonfire/comm/gpu_sharing.h"
#include "bonfire/comm/socket.h"

namespace bonfire::cuda {
namespace {

std::string uuid_of(c10::Device device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  std::string text;
  for (const char byte : properties.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace

int let_ranks_share_gpus(c10d::Store& store, int rank, int size, c10::Device device) {
  const std::string host = host_name();
  const GpuSharing sharing = count_gpu_sharing(store, size, host, uuid_of(device));
  constexpr int keep_the_users = 0;
  if (sharing.on_mine > 1) setenv("NCCL_HOSTID", fmt::format("{} rank {}", host, rank).c_str(), keep_the_users);
  if (sharing.most > 1 && sharing.one_host) setenv("NCCL_SOCKET_IFNAME", "lo", keep_the_users);
  return sharing.most;
}

}  // namespace bonfire::cuda
