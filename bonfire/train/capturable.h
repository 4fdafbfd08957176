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

// Steps that are issued before one is captured. In the first step of a run, which is taken in parts, buffers are made,
// orders agreed on, and products tried; in the first of these parameters lie where they will stay, and products that add to
// a gradient are tried.
inline constexpr std::int64_t steps_before_capture = 2;

// How many steps a run takes before they are all alike: the first, which sets it up; on a GPU also the one after it; and,
// where steps are captured, those before that and the one with it.
BONFIRE_API std::int64_t steps_to_settle(const Config& config, c10::Device device);

}  // namespace bonfire
