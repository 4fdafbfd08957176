#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

struct StoreServerOptions {
  Endpoint listen = {"127.0.0.1", 0};  // port 0: a free one
  std::string token;                   // whoever does not present it is refused; must not be empty
  // How long the destructor lets others finish, who still need the store although its owner is done.
  std::chrono::milliseconds drain = std::chrono::milliseconds(0);
  Log log{};
};

// The key-value store through which the ranks of a job find each other, on a thread of its own. It listens on one address,
// loopback unless told otherwise, and speaks only to those who know the job's token.
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

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

// True where both are equal; takes the same time wherever they differ.
BONFIRE_API bool same_secret(const std::string& a, const std::string& b);
// 32 hexadecimal digits from the kernel's generator.
BONFIRE_API std::string random_token();

}  // namespace bonfire
