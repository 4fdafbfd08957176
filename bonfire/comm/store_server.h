#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/secret.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

struct StoreServerOptions {
  Endpoint listen = {"127.0.0.1", 0};  // port 0: a free one
  std::string token;                   // whoever does not prove that it knows it is refused; must not be empty
  // How long the destructor lets others finish, who still need the store although its owner is done.
  std::chrono::milliseconds drain = std::chrono::milliseconds(0);
  // How long a client's machine may be silent before it is gone, and its last words are said; 0: for ever. As long as a rank
  // may (StallLimits): a network that is back by then has hurt nobody.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  Log log{};

  // Connections that have not proved that they know the token: how many are held at once, and for how long. Where there are
  // as many, more wait until one of them has proved it, or is older than `crowded_patience` and is refused.
  int most_strangers = 512;
  std::chrono::milliseconds stranger_patience = std::chrono::seconds(10);
  std::chrono::milliseconds crowded_patience = std::chrono::seconds(1);
};

// What a store has received from and sent to those who know the token: frames, and their bytes with the lengths in front.
struct StoreTraffic {
  std::int64_t requests = 0, request_bytes = 0;
  std::int64_t answers = 0, answer_bytes = 0;

  StoreTraffic& operator+=(const StoreTraffic& more) {
    requests += more.requests;
    request_bytes += more.request_bytes;
    answers += more.answers;
    answer_bytes += more.answer_bytes;
    return *this;
  }
};

// The key-value store through which the ranks of a job find each other, on a thread of its own. It listens on one address,
// loopback unless told otherwise, and speaks only to those who prove that they know the job's token.
class BONFIRE_API StoreServer {
 public:
  // Throws Error where the port is in use.
  explicit StoreServer(StoreServerOptions options);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const Endpoint& endpoint() const;
  // Connections turned away so far.
  int refused() const;
  StoreTraffic traffic() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace bonfire
