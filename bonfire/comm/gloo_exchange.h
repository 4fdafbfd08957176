#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/comm/backend.h"
#include "bonfire/comm/work.h"

namespace bonfire {

// Memory into which parts of other ranks arrive, kept from one collective to the next. It holds as many buffers as were ever
// in use at once, none larger than the largest that was asked for: what a first step has taken, the next one finds.
class BONFIRE_API ReceiveBuffers {
 public:
  at::Tensor take(std::int64_t bytes);  // of uint8, at least so many
  void give_back(at::Tensor buffer);

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> free_;
};

// Gathering and scattering reductions over the messages of a Gloo process group: every rank sends each other rank its part
// and receives theirs where they belong. c10d's own gather goes through two more copies of the whole, and its
// reduce_scatter is an all-reduce inside.
//
// Threads of its own post the messages and wait for them, so that the end of a collective is known when it happens. They
// post, not the rank: Gloo's thread spins while it finds a connection locked, and the rank, which computes, would often be
// made to wait with the lock in its hand.
class GlooExchange {
 public:
  explicit GlooExchange(c10d::Backend& gloo) : gloo_(gloo) {}
  // Waits for what was begun.
  ~GlooExchange();
  GlooExchange(const GlooExchange&) = delete;
  GlooExchange& operator=(const GlooExchange&) = delete;

  // All messages of a collective are posted before any is waited for.
  Work all_gather(std::span<const Transfer> transfers);
  // The sum is taken by the thread that waits. The part is written when all of the whole has been sent, so it may lie in it.
  Work reduce_scatter(std::span<const Transfer> transfers, Reduce op);

 private:
  class Collective;

  static constexpr int kThreads = 2;  // collectives under way at once

  Work begin(std::shared_ptr<Collective> collective);
  std::shared_ptr<Collective> next();
  void run();

  c10d::Backend& gloo_;
  std::shared_ptr<ReceiveBuffers> buffers_ = std::make_shared<ReceiveBuffers>();
  std::mutex posting_;  // held from taking a collective to having posted it: all ranks post in one order
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Collective>> begun_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // run from the first collective on
};

}  // namespace bonfire
