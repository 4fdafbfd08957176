#pragma once

#include <c10/core/Device.h>

namespace bonfire::testing {

// Many updates in one call leave the bits that they leave one by one: more of them than a launch takes, of odd sizes and
// places, with gradients of several types, and with what only some of them have.
void expect_many_updates_equal_single_ones(c10::Device device);

}  // namespace bonfire::testing
