#include "bonfire/comm/gloo_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <gloo/common/error.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/base/open_files.h"
#include "bonfire/comm/c10d_backend.h"
#include "bonfire/comm/emulated_link.h"
#include "bonfire/comm/gloo_exchange.h"
#include "bonfire/comm/secret.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/world.h"

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
  bool wait_for(std::chrono::milliseconds time) override {
    if (time.count() <= 0) return done();  // c10d takes zero for no limit
    try {
      with_peers([&] { work_->wait(time); });
    } catch (const c10::Error&) {
      if (!work_->isCompleted()) return false;
      // It may have ended just after the time was over: what it says of itself counts.
      wait();
    }
    return true;
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

// Ends waits for messages when their time is over: a timeout of Gloo's own closes all connections of its group.
class WaitLimits {
 public:
  using Time = std::chrono::steady_clock::time_point;

  ~WaitLimits() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Whether `work` has ended by `end`. Gloo throws where that takes longer than `longest`.
  bool wait(const c10::intrusive_ptr<c10d::Work>& work, Time end, std::chrono::milliseconds longest) {
    while (true) {
      const auto waiting = add(work, end);
      const auto remove = c10::make_scope_exit([&] {
        const std::lock_guard lock(mutex_);
        waiting_.erase(waiting);
      });
      // It may have been ended in the place of an earlier one.
      if (work->wait(longest)) return true;
      if (std::chrono::steady_clock::now() >= end) return false;
    }
  }

 private:
  using Waiting = std::multimap<Time, c10::intrusive_ptr<c10d::Work>>;

  Waiting::iterator add(const c10::intrusive_ptr<c10d::Work>& work, Time end) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    const auto added = waiting_.emplace(end, work);
    if (end < next_) changed_.notify_all();
    return added;
  }

  // A wait that has yet to begin when its time is over ends at once.
  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const auto first_left = waiting_.upper_bound(std::chrono::steady_clock::now());
      for (auto over = waiting_.begin(); over != first_left; ++over) over->second->abort();
      next_ = first_left == waiting_.end() ? Time::max() : first_left->first;
      if (next_ == Time::max())
        changed_.wait(lock);
      else
        changed_.wait_until(lock, next_);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Waiting waiting_;
  Time next_ = Time::max();
  bool stopping_ = false;
  std::thread thread_;
};

// Messages that are all posted before any is waited for. Gloo's point-to-point works have no future, so their end is known
// when they are waited for.
class BatchState : public Work::State {
 public:
  BatchState(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> tensors,
             std::chrono::milliseconds limit, std::shared_ptr<WaitLimits> limits)
      : works_(std::move(works)),
        tensors_(std::move(tensors)),
        limit_(limit),
        limits_(std::move(limits)),
        start_(now_ns()) {}

  void wait() override {
    while (!wait_for(limit_)) {
    }
  }

  bool wait_for(std::chrono::milliseconds time) override {
    if (time.count() <= 0) return done();
    std::function<void(Nanoseconds, Nanoseconds)> callback;
    {
      const std::lock_guard lock(mutex_);
      if (!with_peers([&] { return all_ended_within(time); })) return false;
      *ended_ = true;
      if (end_ == 0) end_ = now_ns();
      callback = std::exchange(callback_, nullptr);
    }
    if (callback) callback(start_, end_);
    return true;
  }

  bool done() override { return *ended_; }

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
  // Throws where a connection is gone, and where it has been waited for as long as the group allows.
  bool all_ended_within(std::chrono::milliseconds time) {
    const auto now = std::chrono::steady_clock::now();
    if (!longest_) longest_ = now + limit_;
    for (; !works_.empty(); works_.erase(works_.begin())) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*longest_ - std::chrono::steady_clock::now());
      // c10d takes zero for no limit.
      if (!limits_->wait(works_.front(), now + time, std::max(left, std::chrono::milliseconds(1)))) return false;
    }
    return true;
  }

  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;  // those that have not ended
  std::vector<at::Tensor> tensors_;
  std::chrono::milliseconds limit_;
  std::shared_ptr<WaitLimits> limits_;
  std::optional<WaitLimits::Time> longest_;  // from the first wait on
  Nanoseconds start_, end_ = 0;
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  std::function<void(Nanoseconds, Nanoseconds)> callback_;
};

class GlooBackend final : public C10dBackend {
 public:
  using C10dBackend::C10dBackend;

  Work all_gather(std::span<const Transfer> transfers) override {
    return with_peers([&] { return exchange_.all_gather(transfers); });
  }
  Work reduce_scatter(std::span<const Transfer> transfers, Reduce op) override {
    return with_peers([&] { return exchange_.reduce_scatter(transfers, op); });
  }

  Work batch(std::span<const Message> messages) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<at::Tensor> tensors;
    for (const auto& message : messages) {
      std::vector<at::Tensor> one{message.tensor};
      // On a connection that is gone this throws at once.
      works.push_back(with_peers([&] {
        return message.way == Message::Way::send ? backend().send(one, message.peer, 0)
                                                 : backend().recv(one, message.peer, 0);
      }));
      tensors.push_back(message.tensor);
    }
    return Work(
        std::make_shared<BatchState>(std::move(works), std::move(tensors), backend().getBackendOptions()->timeout, limits_));
  }

  Work over(EmulatedLink& link, double seconds, Work work) override { return end_with_turn(link, seconds, std::move(work)); }
  bool ordered() const override { return false; }
  std::string stream() const override { return "gloo"; }

 protected:
  Work track(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors) override {
    return Work(std::make_shared<GlooState>(std::move(work), std::move(tensors)));
  }

 private:
  GlooExchange exchange_{backend()};
  std::shared_ptr<WaitLimits> limits_ = std::make_shared<WaitLimits>();
};

// Until all ranks are connected to all: one that ends at once would close connections that others are still waiting for.
void await_connections(c10d::Store& store, const CommunicatorOptions& options) {
  if (store.add("connected", 1) == options.size) store.set("all_connected", std::vector<std::uint8_t>{1});
  store.wait({"all_connected"}, options.timeout);
}

// Gloo takes whoever connects to its port and says the right small number for the rank it waits for. So before any data
// flows, both ends of every pair say what only a process of this job can: a hash over the job's secret, a number drawn for
// this group alone, and who speaks to whom. What a stranger overhears is of no use to it elsewhere.
void prove_each_other(c10d::Backend& gloo, c10d::Store& store, const CommunicatorOptions& options) {
  constexpr int kTag = 2;                                                   // 0 and 1 are for messages and exchanges
  constexpr std::chrono::milliseconds kLongest = std::chrono::seconds(30);  // all ranks are there
  if (options.rank == 0) store.set("nonce", random_token());
  const std::string key = hmac_sha256(options.secret, store.get_to_str("nonce"));
  const auto proof = [&](int from, int to) { return hmac_sha256(key, fmt::format("pair {} {}", from, to)); };

  struct Peer {
    int rank;
    at::Tensor mine, theirs;
    c10::intrusive_ptr<c10d::Work> sent, received;
  };
  std::vector<Peer> peers;
  for (int rank = 0; rank < options.size; ++rank) {
    if (rank == options.rank) continue;
    const std::string words = proof(options.rank, rank);
    const auto size = static_cast<std::int64_t>(words.size());
    Peer peer{rank, at::empty({size}, at::kByte), at::empty({size}, at::kByte), nullptr, nullptr};
    std::memcpy(peer.mine.data_ptr(), words.data(), words.size());
    peers.push_back(std::move(peer));
  }
  for (Peer& peer : peers) {
    std::vector<at::Tensor> mine{peer.mine}, theirs{peer.theirs};
    peer.received = gloo.recv(theirs, peer.rank, kTag);
    peer.sent = gloo.send(mine, peer.rank, kTag);
  }
  const auto limit = std::min(options.timeout, kLongest);
  for (Peer& peer : peers) {
    std::string said;
    try {
      peer.received->wait(limit);
      said.assign(static_cast<const char*>(peer.theirs.const_data_ptr()), static_cast<std::size_t>(peer.theirs.numel()));
    } catch (const std::exception& error) {
      said = std::string("nothing: ") + error.what();
    }
    if (same_secret(said, proof(peer.rank, options.rank))) continue;
    const std::size_t at = static_cast<std::size_t>(peer.rank);
    const bool silent = said.starts_with("nothing");
    const auto words = fmt::format("whoever is connected in the place of rank {} has not proved that it is of this job: {}",
                                   at < options.members.size() ? options.members[at] : peer.rank,
                                   silent ? said.substr(0, said.find('\n')) : "it said something else");
    // One that says nothing may have ended just now.
    if (silent) throw PeerLost(words);
    fail("{}", words);
  }
  for (Peer& peer : peers) peer.sent->wait(limit);
}

// Where to listen: the address that was given; where none was, that of GLOO_SOCKET_IFNAME's first interface.
std::string listening_address(const std::string& given) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (given != WorldOptions{}.address || interface == nullptr || *interface == '\0') return given;
  const std::string names = interface;
  return address_of_interface(names.substr(0, names.find(',')));
}

}  // namespace

std::shared_ptr<Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const CommunicatorOptions& options) {
  switch_flight_recorder_off();
  // Gloo finds out in the middle of connecting, and its words name no limit.
  constexpr long own = 16;  // its listener, its loop, and what others open meanwhile
  require_open_files(open_files() + options.size + own,
                     fmt::format("the connections of one rank to {} others (Gloo)", options.size - 1));
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(listening_address(options.address)));
  return with_peers([&] {
    auto process_group = c10::make_intrusive<c10d::ProcessGroupGloo>(store, options.rank, options.size, gloo);
    await_connections(*store, options);
    prove_each_other(*process_group, *store, options);
    return adopt_gloo_backend(std::move(process_group));
  });
}

std::shared_ptr<Backend> adopt_gloo_backend(c10::intrusive_ptr<c10d::Backend> process_group) {
  return std::make_shared<GlooBackend>(std::move(process_group));
}

}  // namespace bonfire
