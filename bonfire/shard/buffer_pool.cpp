#include "bonfire/shard/buffer_pool.h"

#include <exception>

#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/side_stream.h"

namespace bonfire {
namespace {

// Sizes that differ by less than this share a class.
constexpr std::int64_t granule = 512;

}  // namespace

PoolBuffer::~PoolBuffer() {
  try {
    if (!finished_) pool_.note_use(block_);
  } catch (const std::exception&) {
    // Its stream belongs to a capture that was refused, and has used nothing.
  }
  pool_.give_back(block_);
}

void PoolBuffer::finished() {
  pool_.note_use(block_);
  finished_ = true;
}

void* PoolBuffer::data() const { return pool_.blocks_[block_].memory.data_ptr(); }

at::Tensor PoolBuffer::bytes(std::int64_t count) const { return pool_.blocks_[block_].memory.narrow(0, 0, count); }

std::size_t BufferPool::find(std::int64_t bytes, std::int64_t place) const {
  if (const auto known = places_.find({place, bytes}); place >= 0 && known != places_.end() && blocks_[known->second].free)
    return known->second;
  std::size_t best = blocks_.size();
  for (std::size_t at = 0; at < blocks_.size(); ++at) {
    const auto size = blocks_[at].memory.numel();
    if (!blocks_[at].free || size < bytes) continue;
    if (best == blocks_.size() || size < blocks_[best].memory.numel()) best = at;
  }
  return best;
}

std::shared_ptr<PoolBuffer> BufferPool::borrow(std::int64_t bytes, std::int64_t place) {
  require(bytes > 0, "a buffer of {} bytes was asked for, must be more than 0", bytes);
  const std::size_t at = find(bytes, place);
  if (at == blocks_.size()) {
    const auto size = round_up(bytes, granule);
    blocks_.push_back({.memory = at::empty({size}, at::TensorOptions(at::kByte).device(device_))});
    bytes_ += size;
  }
  auto& block = blocks_[at];
  if (block.last_use) block.last_use->block(current_stream(device_));
  block.free = false;
  if (place >= 0) places_[{place, bytes}] = at;
  ++lent_;
  return std::make_shared<PoolBuffer>(*this, at);
}

void BufferPool::forget_uses() {
  for (auto& block : blocks_) block.last_use.reset();
}

void BufferPool::note_use(std::size_t at) {
  if (device_.is_cpu()) return;
  auto& event = blocks_[at].last_use;
  if (!event) event = std::make_unique<c10::Event>(device_.type());
  event->record(current_stream(device_));
}

void BufferPool::give_back(std::size_t at) {
  blocks_[at].free = true;
  --lent_;
}

}  // namespace bonfire
