#pragma once

#include <functional>
#include <string>

#include <c10/core/Device.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"

namespace bonfire {

// Everybody hears what rank `root` of the group says; what others say is not heard. Collective.
BONFIRE_API std::string hear(const Group& group, const std::string& said, int root, c10::Device device);

// Does `what`. If it throws on any rank, all throw what the first of these says, and nobody waits for a rank that has given
// up. Collective.
BONFIRE_API void do_or_fail_together(const Group& group, const std::function<void()>& what);

}  // namespace bonfire
