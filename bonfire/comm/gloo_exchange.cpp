#include "bonfire/comm/gloo_exchange.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/ops/empty.h>
#include <gloo/common/error.h>

#include "bonfire/comm/reduce_parts.h"

namespace bonfire {
namespace {

// Apart from the messages of Group::batch, which have 0. Between two ranks messages of one tag arrive in order.
constexpr int kTag = 1;

at::Tensor slice(const at::Tensor& whole, const at::Tensor& part, int rank) {
  return whole.narrow(0, rank * part.numel(), part.numel());
}

}  // namespace

at::Tensor ReceiveBuffers::take(std::int64_t bytes) {
  at::Tensor buffer;
  {
    const std::lock_guard lock(mutex_);
    const auto smaller = [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); };
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at)
      if (at->numel() >= bytes && (best == free_.end() || smaller(*at, *best))) best = at;
    // One that is too small makes room for one that is not, so that there are never more than are used at once.
    if (best == free_.end()) best = std::max_element(free_.begin(), free_.end(), smaller);
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
    }
  }
  if (buffer.defined() && buffer.numel() >= bytes) return buffer;
  buffer.reset();
  return at::empty({bytes}, at::kByte);
}

void ReceiveBuffers::give_back(at::Tensor buffer) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(buffer));
}

class GlooExchange::Collective : public Work::State {
 public:
  using Callback = std::function<void(Nanoseconds, Nanoseconds)>;

  std::vector<Message> messages;
  // What the waiting thread does when all messages have come.
  std::function<void()> finish;

  // On the exchange's threads.
  void post(c10d::Backend& gloo) {
    works_.reserve(messages.size());
    note_errors([&] {
      for (const auto& message : messages) {
        std::vector<at::Tensor> one{message.tensor};
        works_.push_back(message.way == Message::Way::send ? gloo.send(one, message.peer, kTag)
                                                           : gloo.recv(one, message.peer, kTag));
      }
    });
  }

  void complete() {
    for (auto& work : works_) note_errors([&] { work->wait(); });
    works_.clear();
    Callback callback;
    {
      const std::lock_guard lock(mutex_);
      end_ = now_ns();
      callback = std::exchange(callback_, nullptr);
    }
    // Before anybody goes on: who has waited finds the times recorded.
    if (callback) callback(start_, end_);
    {
      const std::lock_guard lock(mutex_);
      *ended_ = true;
    }
    ended_changed_.notify_all();
  }

  void wait() override {
    std::unique_lock lock(mutex_);
    ended_changed_.wait(lock, [this] { return ended_->load(); });
    take_result();
  }
  bool wait_for(std::chrono::milliseconds time) override {
    std::unique_lock lock(mutex_);
    if (!ended_changed_.wait_for(lock, time, [this] { return ended_->load(); })) return false;
    take_result();
    return true;
  }
  bool done() override { return *ended_; }
  std::function<bool()> ending() override {
    return [ended = ended_] { return ended->load(); };
  }
  void on_done(Callback callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (end_ == 0) {
        callback_ = std::move(callback);
        return;
      }
    }
    callback(start_, end_);
  }

 private:
  // REQUIRES: it has ended, and the mutex is held.
  void take_result() {
    if (error_) std::rethrow_exception(error_);
    if (auto once = std::exchange(finish, nullptr)) once();
    messages.clear();
  }

  // The first error is the collective's.
  template <class Function>
  void note_errors(const Function& function) {
    try {
      function();
    } catch (const gloo::IoException& lost) {
      if (!error_) error_ = std::make_exception_ptr(PeerLost(lost.what()));
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::mutex mutex_;
  std::condition_variable ended_changed_;
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  std::exception_ptr error_;  // read when it has ended
  Callback callback_;
  Nanoseconds start_ = now_ns(), end_ = 0;
};

GlooExchange::~GlooExchange() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

std::shared_ptr<GlooExchange::Collective> GlooExchange::next() {
  const std::lock_guard posting(posting_);
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return stopping_ || !begun_.empty(); });
  if (begun_.empty()) return nullptr;
  auto collective = std::move(begun_.front());
  begun_.pop_front();
  lock.unlock();
  collective->post(gloo_);
  return collective;
}

void GlooExchange::run() {
  while (const auto collective = next()) collective->complete();
}

Work GlooExchange::begin(std::shared_ptr<Collective> collective) {
  {
    const std::lock_guard lock(mutex_);
    while (threads_.size() < kThreads) threads_.emplace_back([this] { run(); });
    begun_.push_back(collective);
  }
  wake_.notify_one();
  return Work(std::move(collective));
}

Work GlooExchange::all_gather(std::span<const Transfer> transfers) {
  const int size = gloo_.getSize(), rank = gloo_.getRank();
  auto collective = std::make_shared<Collective>();
  for (const auto& [whole, part] : transfers)
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size, from = (rank + size - step) % size;
      collective->messages.push_back({Message::Way::send, part, to});
      collective->messages.push_back({Message::Way::receive, slice(whole, part, from), from});
    }
  Work work = begin(std::move(collective));
  for (const auto& [whole, part] : transfers) {
    const auto own = slice(whole, part, rank);
    if (own.const_data_ptr() != part.const_data_ptr()) own.copy_(part);
  }
  return work;
}

Work GlooExchange::reduce_scatter(std::span<const Transfer> transfers, Reduce op) {
  const int size = gloo_.getSize(), rank = gloo_.getRank();
  struct Sum {
    at::Tensor part;
    std::vector<const void*> from;  // in rank order
  };
  std::vector<Sum> sums;
  std::vector<at::Tensor> buffers;
  auto collective = std::make_shared<Collective>();
  for (const auto& [whole, part] : transfers) {
    const auto bytes = static_cast<std::int64_t>(part.nbytes());
    auto buffer = buffers_->take(bytes * (size - 1));
    Sum sum{part, std::vector<const void*>(static_cast<std::size_t>(size))};
    sum.from[static_cast<std::size_t>(rank)] = slice(whole, part, rank).const_data_ptr();
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size, from = (rank + size - step) % size;
      const auto arrived = buffer.narrow(0, (step - 1) * bytes, bytes);
      collective->messages.push_back({Message::Way::send, slice(whole, part, to), to});
      collective->messages.push_back({Message::Way::receive, arrived, from});
      sum.from[static_cast<std::size_t>(from)] = arrived.const_data_ptr();
    }
    sums.push_back(std::move(sum));
    buffers.push_back(std::move(buffer));
  }
  collective->finish = [pool = buffers_, sums = std::move(sums), buffers = std::move(buffers), op] {
    for (const auto& [part, from] : sums) reduce_parts(part, from, op);
    for (const auto& buffer : buffers) pool->give_back(buffer);
  };
  return begin(std::move(collective));
}

}  // namespace bonfire
