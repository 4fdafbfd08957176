#pragma once

#include <chrono>

#include "bonfire/base/api.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// When the kernel takes a connection on which nothing arrives for lost: it asks after `idle` seconds, then every `interval`
// seconds, and gives up after `probes` that nobody has answered.
struct KeepAlive {
  int idle = 0;
  int interval = 0;
  int probes = 0;
  bool operator==(const KeepAlive&) const = default;
};

// Lost after `silence`, in the kernel's whole seconds. REQUIRES: it is positive.
BONFIRE_API KeepAlive keep_alive_of(std::chrono::milliseconds silence);

// A peer that vanishes without a word, as where a machine or the network is gone, is noticed after `silence`; 0: it is not
// looked for.
void keep_alive(const Socket& connection, std::chrono::milliseconds silence);

}  // namespace bonfire
