#include "bonfire/pipeline/hear.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace bonfire {

std::string hear(const Group& group, const std::string& said, int root, c10::Device device) {
  auto length = at::tensor({static_cast<std::int64_t>(said.size())}, at::kLong).to(device);
  group.broadcast(length, root).wait();
  auto text = at::zeros({length.item<std::int64_t>()}, at::kByte);
  if (group.rank() == root) std::copy(said.begin(), said.end(), text.data_ptr<std::uint8_t>());
  if (text.numel() == 0) return {};
  text = text.to(device);
  group.broadcast(text, root).wait();
  const auto here = text.cpu();
  return {here.data_ptr<std::uint8_t>(), here.data_ptr<std::uint8_t>() + here.numel()};
}

}  // namespace bonfire
