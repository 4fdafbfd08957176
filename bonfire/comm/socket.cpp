#include "bonfire/comm/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/base/system_error.h"

namespace bonfire {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Null where the name is unknown; `reason` says why.
Addresses look_up(const Endpoint& endpoint, int type, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &list);
  if (error != 0) reason = gai_strerror(error);
  return Addresses(error == 0 ? list : nullptr);
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "?";
  getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

Endpoint endpoint_at(const sockaddr_storage& address, socklen_t length) {
  const in_port_t port = address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                                                       : reinterpret_cast<const sockaddr_in*>(&address)->sin_port;
  return {numeric(reinterpret_cast<const sockaddr*>(&address), length), ntohs(port)};
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

bool is_numeric(const std::string& host) {
  in6_addr ignored;
  return inet_pton(AF_INET, host.c_str(), &ignored) == 1 || inet_pton(AF_INET6, host.c_str(), &ignored) == 1;
}

int milliseconds_until(Deadline deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
}

// False at the deadline, for which it waits where there is no descriptor (-1).
bool wait_for(int fd, short events, const Patience& patience) {
  while (true) {
    pollfd entries[] = {{fd, events, 0}, {patience.given_up, POLLIN, 0}};
    const int ready = poll(entries, 2, milliseconds_until(patience.until));
    if (ready > 0) {
      require(entries[1].revents == 0, "nobody waits for it any more");
      return true;
    }
    if (ready == 0 && std::chrono::steady_clock::now() >= patience.until) return false;
    if (ready < 0 && errno != EINTR) fail("cannot poll a socket: {}", std::strerror(errno));
  }
}

struct Interface {
  std::string name;
  std::string address;  // numeric; empty: none of the internet's
};

std::vector<Interface> interfaces() {
  ifaddrs* list = nullptr;
  require_system(getifaddrs(&list) == 0, "cannot list the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6)
      found.push_back(
          {entry->ifa_name, numeric(entry->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6))});
    else
      found.push_back({entry->ifa_name, ""});
  }
  return found;
}

Socket try_connect(const addrinfo& address, const Patience& patience, std::string& reason) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol));
  if (!socket) {
    reason = std::strerror(errno);
    return {};
  }
  if (connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    int error = errno;
    if (error == EINPROGRESS) {
      socklen_t length = sizeof error;
      const Deadline most = std::min(patience.until, deadline_in(std::chrono::seconds(5)));
      if (!wait_for(socket.fd(), POLLOUT, {most, patience.given_up}))
        error = ETIMEDOUT;
      else
        getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error != 0) {
      reason = std::strerror(error);
      return {};
    }
  }
  const int on = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

}  // namespace

std::string to_string(const Endpoint& endpoint) {
  const bool six = endpoint.host.find(':') != std::string::npos;
  return fmt::format("{}{}{}:{}", six ? "[" : "", endpoint.host, six ? "]" : "", endpoint.port);
}

Endpoint parse_endpoint(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  Endpoint endpoint;
  if (colon != std::string::npos) {
    endpoint.host = text.substr(0, colon);
    if (endpoint.host.size() > 2 && endpoint.host.front() == '[' && endpoint.host.back() == ']')
      endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
    if (error == std::errc() && stop == end && endpoint.port >= 1 && endpoint.port <= 65535 && !endpoint.host.empty())
      return endpoint;
  }
  fail_config("'{}' is not HOST:PORT with a port from 1 to 65535", text);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Socket::~Socket() { close(); }

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void rest(const Patience& patience) { wait_for(-1, 0, patience); }

Socket listen_on(const Endpoint& endpoint) {
  std::string reason = "no address";
  const Addresses addresses = look_up(endpoint, SOCK_STREAM, reason);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket(::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, address->ai_protocol));
    if (!socket) {
      reason = std::strerror(errno);
      continue;
    }
    // A port whose last owner has just gone is free; one that is listened on is not.
    const int on = 1;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(socket.fd(), address->ai_addr, address->ai_addrlen) == 0 && listen(socket.fd(), SOMAXCONN) == 0) return socket;
    if (errno == EADDRINUSE)
      fail_config("port {} of {} is in use: give another one, or none for a free one", endpoint.port, endpoint.host);
    reason = std::strerror(errno);
  }
  fail("cannot listen on {}: {}", to_string(endpoint), reason);
}

Endpoint endpoint_of(const Socket& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  require_system(getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length) == 0, "a socket has no address");
  return endpoint_at(address, length);
}

Endpoint peer_of(const Socket& connection) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (getpeername(connection.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return {"?", 0};
  return endpoint_at(address, length);
}

Socket connect_to(const Endpoint& endpoint, const Patience& patience) {
  auto pause = std::chrono::milliseconds(10);
  while (true) {
    std::string reason = "no address";
    const Addresses addresses = look_up(endpoint, SOCK_STREAM, reason);
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next)
      if (Socket socket = try_connect(*address, patience, reason)) return socket;
    if (deadline_in(pause) >= patience.until) fail("cannot connect to {}: {}", to_string(endpoint), reason);
    rest({deadline_in(pause), patience.given_up});
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  }
}

void send_all(const Socket& socket, std::string_view bytes, const Patience& patience) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      require(wait_for(socket.fd(), POLLOUT, patience), "no answer in time");
    } else if (sent < 0 && errno != EINTR) {
      fail("connection lost: {}", std::strerror(errno));
    }
  }
}

void receive_all(const Socket& socket, std::span<char> bytes, const Patience& patience) {
  while (!bytes.empty()) {
    const ssize_t got = recv(socket.fd(), bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      fail("connection closed by the other side");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      require(wait_for(socket.fd(), POLLIN, patience), "no answer in time");
    } else if (errno != EINTR) {
      fail("connection lost: {}", std::strerror(errno));
    }
  }
}

std::string host_name() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) return "?";
  return name;
}

std::string address_of_interface(const std::string& name) {
  std::vector<std::string> names;
  std::string found;
  for (const Interface& entry : interfaces()) {
    if (std::find(names.begin(), names.end(), entry.name) == names.end()) names.push_back(entry.name);
    const bool six = entry.address.find(':') != std::string::npos;
    if (entry.name != name || entry.address.empty()) continue;
    if (!six) return entry.address;
    if (found.empty()) found = entry.address;
  }
  if (found.empty())
    fail_config("there is no network interface '{}' with an address; there are {}", name, fmt::join(names, ", "));
  return found;
}

std::string address_towards(const std::string& host) {
  std::string reason = "no address";
  // Connecting a datagram socket sends nothing; it only asks the kernel for the way.
  const Endpoint endpoint{host, 9};
  const Addresses addresses = look_up(endpoint, SOCK_DGRAM, reason);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, address->ai_protocol));
    if (socket && connect(socket.fd(), address->ai_addr, address->ai_addrlen) == 0) return endpoint_of(socket).host;
    reason = std::strerror(errno);
  }
  fail("no way to host {}: {}", host, reason);
}

std::string address_for_others(const std::string& host, const std::string& own) {
  if (is_numeric(host) || host == "localhost") return host;
  std::string reason;
  const Addresses addresses = look_up({host, 0}, SOCK_STREAM, reason);
  // A name that nobody knows yet may be known soon: whoever connects tries again.
  if (!addresses && host != host_name()) return host;
  std::string loopback, other;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const std::string found = numeric(address->ai_addr, address->ai_addrlen);
    std::string& kind = is_loopback(found) ? loopback : other;
    if (kind.empty()) kind = found;
  }
  if (addresses && loopback.empty()) return host;
  if (!other.empty()) return other;
  if (!own.empty()) return own;

  std::vector<std::string> candidates;
  for (const Interface& entry : interfaces())
    if (!entry.address.empty() && !is_loopback(entry.address) && !entry.address.starts_with("fe80:"))
      candidates.push_back(entry.address);
  if (candidates.size() == 1) return candidates.front();
  // Addresses of documentation, to which nothing is sent: the way to them is the default route.
  for (const char* outside : {"203.0.113.1", "2001:db8::1"}) try {
      const std::string address = address_towards(outside);
      if (!is_loopback(address)) return address;
    } catch (const Error&) {
      continue;
    }
  fail("host '{}' is {} here, where other machines cannot reach it, and this machine's own addresses are {}: name one", host,
       loopback.empty() ? "unknown" : loopback,
       candidates.empty() ? "none" : fmt::format("{}", fmt::join(candidates, ", ")));
}

}  // namespace bonfire
