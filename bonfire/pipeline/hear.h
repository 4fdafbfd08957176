#pragma once

#include <string>

#include <c10/core/Device.h>

#include "bonfire/comm/group.h"

namespace bonfire {

// Everybody hears what rank `root` of the group says; what others say is not heard. Collective.
std::string hear(const Group& group, const std::string& said, int root, c10::Device device);

}  // namespace bonfire
