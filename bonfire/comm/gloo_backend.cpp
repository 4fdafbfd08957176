#include "bonfire/comm/gloo_backend.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <mutex>

#include <gloo/common/error.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/c10d_backend.h"
#include "bonfire/comm/emulated_link.h"

namespace bonfire {
namespace {

// Gloo's connections are gone, or nothing came over them in time: both are the other side's doing.
template <class Function>
auto with_peers(const Function& function) {
  try {
    return function();
  } catch (const gloo::IoException& error) {
    throw PeerLost(error.what());
  }
}

class GlooState : public Work::State {
 public:
  GlooState(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors)
      : work_(std::move(work)), tensors_(std::move(tensors)), start_(now_ns()) {}

  void wait() override {
    with_peers([&] { work_->wait(); });
  }
  bool done() override { return work_->isCompleted(); }

  // c10d's own answer would come from the work, which holds the tensors.
  std::function<bool()> ending() override {
    auto ended = std::make_shared<std::atomic<bool>>(false);
    work_->getFuture()->addCallback([ended](c10::ivalue::Future&) { *ended = true; });
    return [ended] { return ended->load(); };
  }

  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
    work_->getFuture()->addCallback(
        [start = start_, callback = std::move(callback)](c10::ivalue::Future&) { callback(start, now_ns()); });
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  Nanoseconds start_;
};

// Gloo's own reduce-scatter is an all-reduce inside. An all-to-all and a local sum in rank order move half the bytes, and
// the order of summation is fixed.
class ReduceScatterState : public Work::State {
 public:
  ReduceScatterState(Work exchange, at::Tensor output, at::Tensor received, Reduce op)
      : exchange_(std::move(exchange)), output_(std::move(output)), received_(std::move(received)), op_(op) {}

  void wait() override {
    exchange_.wait();
    const std::lock_guard lock(mutex_);
    if (!received_.defined()) return;
    const auto ranks = received_.size(0);
    auto output = output_.view(-1);
    output.copy_(received_.select(0, 0));
    for (int64_t rank = 1; rank < ranks; ++rank) {
      if (op_ == Reduce::max)
        at::maximum_out(output, output, received_.select(0, rank));
      else
        output.add_(received_.select(0, rank));
    }
    if (op_ == Reduce::average) output.div_(ranks);
    received_.reset();
  }

  bool done() override { return exchange_.done(); }
  std::function<bool()> ending() override { return exchange_.state()->ending(); }
  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
    exchange_.state()->on_done(std::move(callback));
  }

 private:
  Work exchange_;
  std::mutex mutex_;
  at::Tensor output_, received_;
  Reduce op_;
};

// Several collectives that count as one.
class JoinedState : public Work::State {
 public:
  explicit JoinedState(std::vector<Work> works) : works_(std::move(works)) {}

  void wait() override {
    for (auto& work : works_) work.wait();
  }
  bool done() override {
    return std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work.done(); });
  }
  std::function<bool()> ending() override {
    std::vector<std::function<bool()>> all;
    for (auto& work : works_) all.push_back(work.state()->ending());
    return [all = std::move(all)] { return std::all_of(all.begin(), all.end(), [](const auto& ended) { return ended(); }); };
  }
  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
    struct Times {
      std::mutex mutex;
      std::size_t running;
      Nanoseconds start = std::numeric_limits<Nanoseconds>::max(), end = 0;
    };
    auto times = std::make_shared<Times>();
    times->running = works_.size();
    for (auto& work : works_)
      work.state()->on_done([times, callback](Nanoseconds start, Nanoseconds end) {
        {
          const std::lock_guard lock(times->mutex);
          times->start = std::min(times->start, start);
          times->end = std::max(times->end, end);
          if (--times->running > 0) return;
        }
        callback(times->start, times->end);
      });
  }

 private:
  std::vector<Work> works_;
};

// Messages that are all posted before any is waited for. Gloo's point-to-point works have no future, so their end is known
// when they are waited for.
class BatchState : public Work::State {
 public:
  explicit BatchState(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> tensors)
      : works_(std::move(works)), tensors_(std::move(tensors)), start_(now_ns()) {}

  void wait() override {
    std::function<void(Nanoseconds, Nanoseconds)> callback;
    {
      const std::lock_guard lock(mutex_);
      with_peers([&] {
        for (auto& work : works_) work->wait();
      });
      works_.clear();
      *ended_ = true;
      if (end_ == 0) end_ = now_ns();
      callback = std::exchange(callback_, nullptr);
    }
    if (callback) callback(start_, end_);
  }

  bool done() override {
    const std::lock_guard lock(mutex_);
    for (auto& work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }

  std::function<bool()> ending() override {
    return [ended = ended_] { return ended->load(); };
  }

  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
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
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<at::Tensor> tensors_;
  Nanoseconds start_, end_ = 0;
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  std::function<void(Nanoseconds, Nanoseconds)> callback_;
};

class GlooBackend final : public C10dBackend {
 public:
  using C10dBackend::C10dBackend;

  // Gloo gathers into memory of its own and copies from there, so a part inside its whole is safe.
  Work all_gather(std::span<const Transfer> transfers) override {
    return as_one(transfers, [&](at::Tensor whole, at::Tensor part) {
      return track(backend()._allgather_base(whole, part, {}), {whole, part});
    });
  }

  // The part is written when all of the whole has been sent, so it may lie inside it.
  Work reduce_scatter(std::span<const Transfer> transfers, Reduce op) override {
    return as_one(transfers, [&](at::Tensor whole, at::Tensor part) {
      auto received = at::empty({backend().getSize(), part.numel()}, whole.options());
      auto exchange = all_to_all(received, std::move(whole));
      return Work(std::make_shared<ReduceScatterState>(std::move(exchange), std::move(part), std::move(received), op));
    });
  }

  Work batch(std::span<const Message> messages) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> tensors;
    for (const auto& message : messages) {
      std::vector<at::Tensor> one{message.tensor};
      works.push_back(message.way == Message::Way::send ? backend().send(one, message.peer, 0)
                                                        : backend().recv(one, message.peer, 0));
      tensors.push_back(message.tensor);
    }
    return Work(std::make_shared<BatchState>(std::move(works), std::move(tensors)));
  }

  Work over(EmulatedLink& link, double seconds, Work work) override { return end_with_turn(link, seconds, std::move(work)); }
  bool ordered() const override { return false; }
  std::string stream() const override { return "gloo"; }

 protected:
  Work track(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors) override {
    return Work(std::make_shared<GlooState>(std::move(work), std::move(tensors)));
  }

 private:
  // All are begun before any is waited for.
  template <class Begin>
  static Work as_one(std::span<const Transfer> transfers, const Begin& begin) {
    std::vector<Work> works;
    for (const auto& [whole, part] : transfers) works.push_back(begin(whole, part));
    return works.size() == 1 ? works.front() : Work(std::make_shared<JoinedState>(std::move(works)));
  }
};

}  // namespace

std::shared_ptr<Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const CommunicatorOptions& options) {
  switch_flight_recorder_off();
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  gloo->devices.push_back(interface && *interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                                  : c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  return with_peers([&] {
    return adopt_gloo_backend(c10::make_intrusive<c10d::ProcessGroupGloo>(store, options.rank, options.size, gloo));
  });
}

std::shared_ptr<Backend> adopt_gloo_backend(c10::intrusive_ptr<c10d::Backend> process_group) {
  return std::make_shared<GlooBackend>(std::move(process_group));
}

}  // namespace bonfire
