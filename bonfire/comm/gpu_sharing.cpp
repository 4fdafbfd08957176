#include "bonfire/comm/gpu_sharing.h"

#include <cstdint>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace bonfire {

GpuSharing count_gpu_sharing(c10d::Store& store, int size, const std::string& host, const std::string& gpu) {
  const std::string mine = "gpu/ranks of " + gpu, hosts = "gpu/hosts";
  const auto crowd = [](std::int64_t ranks) { return fmt::format("gpu/crowd/{}", ranks); };
  // Whoever is the n-th on a GPU says that there is one with n.
  if (const std::int64_t ranks = store.add(mine, 1); ranks > 1) store.add(crowd(ranks), 1);
  if (store.add("gpu/host/" + host, 1) == 1) store.add(hosts, 1);
  if (store.add("gpu/counted", 1) == size) store.set("gpu/all counted", std::vector<std::uint8_t>{1});
  store.wait({"gpu/all counted"});
  GpuSharing sharing;
  sharing.on_mine = static_cast<int>(store.add(mine, 0));
  sharing.one_host = store.add(hosts, 0) == 1;
  while (store.check({crowd(sharing.most + 1)})) ++sharing.most;
  return sharing;
}

}  // namespace bonfire
