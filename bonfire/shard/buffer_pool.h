#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "bonfire/base/api.h"

namespace bonfire {

class BufferPool;

// Memory on loan from a pool: goes back when the last holder lets go.
class BONFIRE_API PoolBuffer {
 public:
  PoolBuffer(BufferPool& pool, std::size_t block) : pool_(pool), block_(block) {}
  // Stream: the current one has used the memory last; whoever gets it next waits for that, on its stream.
  ~PoolBuffer();
  PoolBuffer(const PoolBuffer&) = delete;
  PoolBuffer& operator=(const PoolBuffer&) = delete;

  // Stream: the current one has used the memory last, though it is held for longer.
  void finished();

  void* data() const;
  at::Tensor bytes(std::int64_t count) const;

 private:
  BufferPool& pool_;
  std::size_t block_;
  bool finished_ = false;
};

// Buffers that are made once and lent again and again. A loan takes the smallest free buffer that is large enough, and the
// same one in every step where it can, so that from the second step on nothing is allocated. How many are out at once is
// decided by whoever borrows: `prefetch` Units ahead borrow `prefetch + 1`.
class BONFIRE_API BufferPool {
 public:
  explicit BufferPool(at::Device device) : device_(device) {}
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // `place`: where in the step this is, to find the same buffer again; negative: nowhere in particular. Stream: the current
  // one waits until the former user of the memory is done with it; the host never does.
  std::shared_ptr<PoolBuffer> borrow(std::int64_t bytes, std::int64_t place = -1);

  // Everything that was issued has ended, or will have before anything else begins: nobody need wait for former users.
  void forget_uses();

  at::Device device() const { return device_; }
  std::int64_t bytes() const { return bytes_; }  // held, lent or not
  std::size_t lent() const { return lent_; }

 private:
  friend class PoolBuffer;
  struct Block {
    at::Tensor memory;
    bool free = true;
    std::unique_ptr<c10::Event> last_use;  // none on a CPU, where work has ended when it is let go
  };
  std::size_t find(std::int64_t bytes, std::int64_t place) const;
  void note_use(std::size_t block);
  void give_back(std::size_t block);

  at::Device device_;
  std::vector<Block> blocks_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> places_;  // (place, bytes) to the block it had last
  std::int64_t bytes_ = 0;
  std::size_t lent_ = 0;
};

}  // namespace bonfire
