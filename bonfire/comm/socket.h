#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "bonfire/base/api.h"

namespace bonfire {

using Deadline = std::chrono::steady_clock::time_point;
inline Deadline deadline_in(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

struct Endpoint {
  std::string host;
  int port = 0;
};
BONFIRE_API std::string to_string(const Endpoint& endpoint);
// "HOST:PORT", "[::1]:PORT". Throws ConfigError.
BONFIRE_API Endpoint parse_endpoint(const std::string& text);

// A file descriptor with an owner.
class BONFIRE_API Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();

 private:
  int fd_ = -1;
};

// How long a call may wait, and a descriptor that ends the wait before: once that is readable, the call fails.
struct Patience {
  Patience(Deadline time) : until(time) {}  // NOLINT: a deadline is a patience
  Patience(Deadline time, int descriptor) : until(time), given_up(descriptor) {}
  Deadline until;
  int given_up = -1;  // none
};

// Waits until then. Throws Error where it is given up before.
BONFIRE_API void rest(const Patience& patience);

// Listens on that address and no other. Port 0: a free one. Throws Error that names the port where it is in use.
BONFIRE_API Socket listen_on(const Endpoint& endpoint);
BONFIRE_API Endpoint endpoint_of(const Socket& listener);
// Who is at the other end of a connection.
BONFIRE_API Endpoint peer_of(const Socket& connection);
// Tries until somebody listens there or its patience ends; then throws Error with the last reason.
BONFIRE_API Socket connect_to(const Endpoint& endpoint, const Patience& patience);

// All of it or Error: a peer that is gone, or no more patience.
BONFIRE_API void send_all(const Socket& socket, std::string_view bytes, const Patience& patience);
BONFIRE_API void receive_all(const Socket& socket, std::span<char> bytes, const Patience& patience);

BONFIRE_API std::string host_name();
// The numeric address of a network interface ("lo", "eth0"). Throws ConfigError that lists those that exist.
BONFIRE_API std::string address_of_interface(const std::string& name);
// The numeric address of this machine from which a packet to `host` would leave. Throws Error.
BONFIRE_API std::string address_towards(const std::string& host);
// Where processes of this machine and of others alike find `host`: the host as it is, unless it is this machine under a name
// that /etc/hosts maps to loopback, as Debian does with a machine's own; then `own`, or the address towards the world
// outside. An address, or "localhost", is taken at its word. Throws Error that names both where there is no such address.
BONFIRE_API std::string address_for_others(const std::string& host, const std::string& own = {});

}  // namespace bonfire
