#pragma once

#include <cstdint>

#include "tests/support/kernel_check.h"

// Eight bits on every device, over tensors that are drawn: of any magnitude, with infinities, numbers that are none, tiny
// ones and zeros among them, or nothing else. A seed is a case; a failure names it.
namespace bonfire::testing {

// Every byte, scale and noted magnitude against an oracle in double that knows formats and rules, not how operators work.
void expect_random_quantized(const KernelCheck& check, std::uint64_t seed);
// Steps of a layer: those that were given numbers give numbers that are near, whatever the steps before them were given;
// those that were not give no numbers.
void expect_random_fp8_steps(const KernelCheck& check, std::uint64_t seed);

}  // namespace bonfire::testing
