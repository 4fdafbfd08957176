#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/world.h"
#include "bonfire/plan/layout.h"

namespace bonfire {

// The head of every message between a worker and a server.
struct Header {
  enum class Kind : std::int64_t {
    hello,    // worker: what it trains, in a text of `bytes` bytes
    start,    // worker 0: the first values of a Unit's shares
    push,     // worker: gradients of a Unit
    end,      // worker: all gradients of its step are sent
    abandon,  // worker: those of its step that are sent are void
    leave,    // worker: it is done
    welcome,  // server: to hello
    answer,   // server: new values of a Unit
  };
  Kind kind = Kind::hello;
  std::int64_t unit = 0;
  std::int64_t version = 0;  // updates that the weights have seen: those that made a gradient, or those that are sent
  std::int64_t step = 0;     // of the worker
  std::int64_t durable = 0;  // the last update that outlives the server
  std::int64_t bytes = 0;
  std::int64_t flag = 0;  // hello: the type of gradients, -1: their masters'; end: the gradients are finite (version: -1
                          // where servers' weights differed in theirs); answer: the gradients were used
  double norm = 0, number = 0;
  Nanoseconds begin = 0, arrived = 0;  // of its turn on the sender's emulated link; 0: there is none

  static constexpr std::int64_t numbers = 11;
  at::Tensor tensor() const;
  static Header read(const at::Tensor& tensor);
  static at::Tensor empty();
};

// One direction of an emulated network card: what goes over it queues. Turns are given by time, not by who asks first, so
// that a message can be accounted for after it has come.
class Port {
 public:
  explicit Port(std::optional<Link> link) : link_(link) {}
  explicit operator bool() const { return link_.has_value(); }
  // The next turn for so many bytes that does not begin before `from`.
  std::pair<Nanoseconds, Nanoseconds> take(Nanoseconds from, std::int64_t bytes);

 private:
  std::optional<Link> link_;
  std::mutex mutex_;
  Nanoseconds free_at_ = 0;
};

void sleep_until(Nanoseconds time);

// Both cards of a rank.
struct Ports {
  explicit Ports(std::optional<Link> link) : out(link), in(link) {}
  Port out, in;
};

// A store for a meeting to which the other side may never come: while a key is waited for, `look` is asked every now and
// then, and throws where that has no use any more.
class MeetingStore final : public c10d::PrefixStore {
 public:
  MeetingStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store, std::function<void()> look)
      : PrefixStore(std::move(prefix), std::move(store)), look_(std::move(look)) {}

  std::vector<std::uint8_t> get(const std::string& key) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::function<void()> look_;
};

// One end of the connection between a worker and a server: a World of these two ranks alone, so that the end of one of them
// breaks no connection but its own. Used by one thread at a time.
class Peer {
 public:
  // Collective among the two. `place`: 0 is the server, 1 the worker. `look` as a MeetingStore's; empty: the other one
  // comes.
  Peer(c10d::Store& store, const std::string& name, int place, const WorldOptions& options, Ports& ports,
       std::function<void()> look = {});

  // The message is on its way; tensors may not change until the Work has ended. Takes a turn on the link where it has
  // tensors; `until`: when that ends.
  Work send(Header header, const std::vector<at::Tensor>& tensors = {}, Nanoseconds* until = nullptr);
  // Waits; throws Error when `stop` becomes true meanwhile.
  Header receive(const std::atomic<bool>& stop);
  void receive(const std::vector<at::Tensor>& tensors, const std::atomic<bool>& stop);
  // Begins to receive a message of these tensors. The head can be read when the Work has ended.
  Work begin_receive(at::Tensor header, const std::vector<at::Tensor>& tensors);
  // The message with this head has come: when its turn on this rank's link is over; 0: there is no link.
  Nanoseconds arrival(const Header& header, std::int64_t bytes);

  const World& world() const { return world_; }

 private:
  World world_;
  int other_;
  Ports& ports_;
};

// What gradients of this type travel in.
at::ScalarType on_wire(plan::Compression compression, at::ScalarType own);

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors);

}  // namespace bonfire
