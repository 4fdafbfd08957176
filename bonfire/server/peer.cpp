#include "bonfire/server/peer.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <exception>
#include <thread>

#include <ATen/ops/empty.h>
#include "bonfire/base/error.h"
#include "bonfire/plan/server.h"

namespace bonfire {
namespace {

static_assert(Header::numbers * sizeof(std::int64_t) == plan::server_head_bytes);

WorldOptions on_host(WorldOptions options) {
  options.device = c10::Device(c10::kCPU);
  return options;
}

c10::intrusive_ptr<c10d::Store> store_for(c10d::Store& store, const std::string& name, std::function<void()> look) {
  auto own = c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store);
  if (look) return c10::make_intrusive<MeetingStore>(name, std::move(own), std::move(look));
  return c10::make_intrusive<c10d::PrefixStore>(name, std::move(own));
}

// Gloo writes to connections in a way that ends the process with SIGPIPE where the other end is gone: here that is PeerLost.
WorldOptions outliving_peers(WorldOptions options) {
  struct sigaction before {
  }, action{};
  action.sa_handler = [](int) {};  // not SIG_IGN, which programs started from this one would inherit
  action.sa_flags = SA_RESTART;
  sigaction(SIGPIPE, nullptr, &before);
  if (before.sa_handler == SIG_DFL) sigaction(SIGPIPE, &action, nullptr);
  return options;
}

void wait_for(Work& work, const std::atomic<bool>& stop) {
  constexpr auto look = std::chrono::milliseconds(100);
  while (!work.wait_for(look)) require(!stop, "the run ends");
}

}  // namespace

at::Tensor Header::empty() { return at::empty({numbers}, at::kLong); }

at::Tensor Header::tensor() const {
  auto tensor = empty();
  const std::int64_t all[numbers] = {
      static_cast<std::int64_t>(kind),     unit,  version, step, durable, bytes, flag, std::bit_cast<std::int64_t>(norm),
      std::bit_cast<std::int64_t>(number), begin, arrived};
  std::copy(all, all + numbers, tensor.data_ptr<std::int64_t>());
  return tensor;
}

Header Header::read(const at::Tensor& tensor) {
  const auto* all = tensor.const_data_ptr<std::int64_t>();
  return {.kind = static_cast<Kind>(all[0]),
          .unit = all[1],
          .version = all[2],
          .step = all[3],
          .durable = all[4],
          .bytes = all[5],
          .flag = all[6],
          .norm = std::bit_cast<double>(all[7]),
          .number = std::bit_cast<double>(all[8]),
          .begin = all[9],
          .arrived = all[10]};
}

std::pair<Nanoseconds, Nanoseconds> Port::take(Nanoseconds from, std::int64_t bytes) {
  const double seconds =
      link_->latency_seconds + (link_->bytes_per_second > 0 ? static_cast<double>(bytes) / link_->bytes_per_second : 0);
  const std::lock_guard lock(mutex_);
  const Nanoseconds begin = std::max(from, free_at_);
  free_at_ = begin + std::llround(seconds * 1e9);
  return {begin, free_at_};
}

void sleep_until(Nanoseconds time) {
  // The delay is the thing emulated, not a way to wait for somebody.
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time)));
}

at::ScalarType on_wire(plan::Compression compression, at::ScalarType own) {
  if (compression == plan::Compression::bf16) return at::kBFloat16;
  if (compression == plan::Compression::fp16) return at::kHalf;
  return own;
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

std::vector<std::uint8_t> MeetingStore::get(const std::string& key) {
  wait({key});
  return PrefixStore::get(key);
}

std::vector<std::vector<std::uint8_t>> MeetingStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  return PrefixStore::multiGet(keys);
}

void MeetingStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr auto slice = std::chrono::milliseconds(100);
  // c10d calls "no timeout" zero.
  const auto end = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  while (true) {
    const auto before = Clock::now();
    try {
      return PrefixStore::wait(keys, slice);
    } catch (const std::exception&) {
      if (Clock::now() < before + slice / 2 || Clock::now() >= end) throw;  // not for want of time, or there is none left
    }
    look_();
  }
}

Peer::Peer(c10d::Store& store, const std::string& name, int place, const WorldOptions& options, Ports& ports,
           std::function<void()> look)
    : world_(World::from_store(store_for(store, name, std::move(look)), place, 2, outliving_peers(on_host(options)))),
      other_(1 - place),
      ports_(ports) {}

Work Peer::send(Header header, const std::vector<at::Tensor>& tensors, Nanoseconds* until) {
  if (ports_.out && !tensors.empty()) {
    std::tie(header.begin, header.arrived) = ports_.out.take(now_ns(), bytes_of(tensors));
    if (until) *until = header.arrived;
  }
  std::vector<Message> messages{{Message::Way::send, header.tensor(), other_}};
  for (const auto& tensor : tensors) messages.push_back({Message::Way::send, tensor, other_});
  return world_.group().batch(messages);
}

Header Peer::receive(const std::atomic<bool>& stop) {
  auto tensor = Header::empty();
  auto work = world_.group().receive(tensor, other_);
  wait_for(work, stop);
  return Header::read(tensor);
}

void Peer::receive(const std::vector<at::Tensor>& tensors, const std::atomic<bool>& stop) {
  std::vector<Message> messages;
  for (const auto& tensor : tensors) messages.push_back({Message::Way::receive, tensor, other_});
  auto work = world_.group().batch(messages);
  wait_for(work, stop);
}

Work Peer::begin_receive(at::Tensor header, const std::vector<at::Tensor>& tensors) {
  std::vector<Message> messages{{Message::Way::receive, std::move(header), other_}};
  for (const auto& tensor : tensors) messages.push_back({Message::Way::receive, tensor, other_});
  return world_.group().batch(messages);
}

// As on a wire, a message is received while it is sent: the slower of the two cards says when it is there.
Nanoseconds Peer::arrival(const Header& header, std::int64_t bytes) {
  if (!ports_.in || header.arrived == 0) return 0;
  return std::max(header.arrived, ports_.in.take(header.begin, bytes).second);
}

}  // namespace bonfire
