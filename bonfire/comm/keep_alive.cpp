#include "bonfire/comm/keep_alive.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

namespace bonfire {
namespace {

constexpr std::int64_t kMostSeconds = 32767, kMostProbes = 127;  // that the kernel takes
constexpr std::int64_t kUsualProbes = 5;                         // one packet that is lost means nothing

std::int64_t divided_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

KeepAlive keep_alive_of(std::chrono::milliseconds silence) {
  const std::int64_t seconds = std::chrono::ceil<std::chrono::seconds>(silence).count();
  const auto idle = std::clamp<std::int64_t>(seconds / 2, 1, kMostSeconds);
  const auto rest = std::max<std::int64_t>(seconds - idle, 1);
  const auto interval = std::min(divided_up(rest, kUsualProbes), kMostSeconds);
  const auto probes = std::min(divided_up(rest, interval), kMostProbes);
  return {static_cast<int>(idle), static_cast<int>(interval), static_cast<int>(probes)};
}

void keep_alive(const Socket& connection, std::chrono::milliseconds silence) {
  const int on = silence.count() > 0 ? 1 : 0;
  setsockopt(connection.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  if (on == 0) return;
  const KeepAlive times = keep_alive_of(silence);
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_KEEPIDLE, &times.idle, sizeof times.idle);
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_KEEPINTVL, &times.interval, sizeof times.interval);
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_KEEPCNT, &times.probes, sizeof times.probes);
}

}  // namespace bonfire
