#include "bonfire/nn/host_inputs.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "bonfire/comm/side_stream.h"

namespace bonfire {

using at::Tensor;

HostInputs::HostInputs() = default;
HostInputs::HostInputs(Options options) : options_(options) {}
HostInputs::~HostInputs() = default;

struct HostInputs::Kept::Copies {
  at::TensorOptions options;             // of the input
  c10::VariableVersion version_counter;  // which it shares
  std::uint32_t version = 0;
  Tensor host;
  Tensor back;  // defined: on its way, or there
  std::optional<c10::Event> arrived{};
};

HostInputs::Kept::Kept(std::shared_ptr<HostInputs> owner, std::unique_ptr<Copies> copies)
    : owner_(std::move(owner)), copies_(std::move(copies)) {}

HostInputs::Kept::~Kept() {
  const std::lock_guard lock(owner_->mutex_);
  // Brought back, and never taken: its memory is not used again before the copy has ended.
  if (const auto device = copies_->options.device(); copies_->back.defined() && !device.is_cpu())
    owner_->beside(device).run_apart([&] { copies_->back.record_stream(current_stream(device)); });
  std::erase(owner_->order_, this);
  owner_->bytes_kept_ -= static_cast<std::int64_t>(copies_->host.nbytes());
}

bool HostInputs::Kept::changed() const { return copies_->version_counter.current_version() != copies_->version; }

Tensor HostInputs::Kept::take() {
  const std::lock_guard lock(owner_->mutex_);
  if (!copies_->back.defined()) owner_->bring_back(*copies_);
  if (copies_->arrived) copies_->arrived->block(current_stream(copies_->options.device()));
  // The one that forward kept before it is the next that backward needs.
  const auto place = std::find(owner_->order_.begin(), owner_->order_.end(), this);
  if (place != owner_->order_.begin())
    if (auto& before = *(*std::prev(place))->copies_; !before.back.defined()) owner_->bring_back(before);
  return std::exchange(copies_->back, {});
}

SideStream& HostInputs::beside(at::Device device) {
  const auto number = static_cast<std::size_t>(std::max<int>(0, device.index()));
  if (streams_.size() <= number) streams_.resize(number + 1);
  if (!streams_[number]) streams_[number] = std::make_unique<SideStream>(device);
  return *streams_[number];
}

std::shared_ptr<HostInputs::Kept> HostInputs::keep(const Tensor& input) {
  if (input.is_cpu() && !options_.from_host) return nullptr;
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  auto copies = std::make_unique<Kept::Copies>();
  copies->options = input.options();
  copies->version_counter = input.unsafeGetTensorImpl()->version_counter();
  copies->version = input._version();
  copies->host = at::empty_like(input, input.options().device(at::kCPU).pinned_memory(!input.is_cpu()));
  beside(input.device()).run([&] {
    copies->host.copy_(input, /*non_blocking=*/true);
    // Its memory is not used again before the copy has ended.
    if (!input.is_cpu()) input.record_stream(current_stream(input.device()));
  });
  bytes_kept_ += static_cast<std::int64_t>(input.nbytes());
  bytes_moved_ += static_cast<std::int64_t>(input.nbytes());
  std::shared_ptr<Kept> kept(new Kept(shared_from_this(), std::move(copies)));
  order_.push_back(kept.get());
  return kept;
}

void HostInputs::bring_back(Kept::Copies& copies) {
  const at::NoGradGuard no_grad;
  copies.back = at::empty_like(copies.host, copies.options);
  auto& stream = beside(copies.options.device());
  stream.run([&] { copies.back.copy_(copies.host, /*non_blocking=*/true); });
  copies.arrived = stream.end();
  bytes_moved_ += static_cast<std::int64_t>(copies.host.nbytes());
}

}  // namespace bonfire
