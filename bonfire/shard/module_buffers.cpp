#include "bonfire/shard/module_buffers.h"

#include <cstdint>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace bonfire {

ModuleBuffers::ModuleBuffers(torch::nn::Module& module, const ShardOptions& options) {
  for (auto& buffer : buffers_of(module, options.wrapping)) {
    auto& tensor = buffer.tensor;
    if (!tensor.defined() || tensor.numel() == 0) continue;
    if (options.precision.buffers && tensor.is_floating_point())
      tensor.set_data(tensor.detach().to(*options.precision.buffers));
    buffers_.push_back(std::move(buffer));
  }
}

void ModuleBuffers::broadcast(const Group& group) {
  if (buffers_.empty()) return;
  std::int64_t bytes = 0;
  for (const auto& buffer : buffers_) bytes += static_cast<std::int64_t>(buffer.tensor.nbytes());
  const at::NoGradGuard no_grad;
  auto packed = at::empty({bytes}, buffers_.front().tensor.options().dtype(at::kByte));
  const auto each = [&](auto&& action) {
    std::int64_t offset = 0;
    for (auto& buffer : buffers_) {
      const auto size = static_cast<std::int64_t>(buffer.tensor.nbytes());
      action(buffer.tensor, packed.narrow(0, offset, size));
      offset += size;
    }
  };
  each([](at::Tensor& buffer, at::Tensor part) { part.copy_(buffer.contiguous().view(-1).view(at::kByte)); });
  group.broadcast(packed, 0).wait();
  if (group.rank() == 0) return;
  each([](at::Tensor& buffer, at::Tensor part) {
    auto values = at::empty(buffer.sizes(), buffer.options());
    values.view(-1).view(at::kByte).copy_(part);
    buffer.copy_(values);
  });
}

}  // namespace bonfire
