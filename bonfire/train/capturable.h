#pragma once

#include <string>

#include <c10/core/Device.h>

#include "bonfire/base/api.h"
#include "bonfire/train/config.h"

namespace bonfire {

// What makes the host take part in every step of this configuration, so that it has to know what the last one came to: a key
// with its value, and why. Empty where nothing does.
BONFIRE_API std::string hindrance_to_device_steps(const Config& config);

// What keeps whole steps of this configuration from being captured and replayed: a key with its value, and why. Empty where
// nothing does.
BONFIRE_API std::string hindrance_to_graphs(const Config& config);

// Whether steps on this device are to be captured. Throws ConfigError where they must be and cannot.
BONFIRE_API bool wants_graphs(const Config& config, c10::Device device);

}  // namespace bonfire
