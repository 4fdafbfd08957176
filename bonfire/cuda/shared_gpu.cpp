#include "bonfire/cuda/shared_gpu.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <string>

#include <c10/cuda/CUDAException.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bonfire::cuda {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string uuid_of(c10::Device device) {
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  std::string text;
  for (const char byte : properties.uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

}  // namespace

int let_ranks_share_gpus(c10d::Store& store, int rank, int size, c10::Device device) {
  const auto key = [](const char* what, int of) { return fmt::format("{} of {}", what, of); };
  const std::string host = host_name(), gpu = uuid_of(device);
  store.set(key("host", rank), host);
  store.set(key("gpu", rank), gpu);
  bool one_host = true;
  std::map<std::string, int> ranks_on;
  int most = 0;
  for (int other = 0; other < size; ++other) {
    most = std::max(most, ++ranks_on[store.get_to_str(key("gpu", other))]);
    one_host &= store.get_to_str(key("host", other)) == host;
  }
  constexpr int keep_the_users = 0;
  if (ranks_on[gpu] > 1) setenv("NCCL_HOSTID", fmt::format("{} rank {}", host, rank).c_str(), keep_the_users);
  if (most > 1 && one_host) setenv("NCCL_SOCKET_IFNAME", "lo", keep_the_users);
  return most;
}

}  // namespace bonfire::cuda
