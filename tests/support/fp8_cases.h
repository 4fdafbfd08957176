#pragma once

#include "tests/support/kernel_check.h"

// What holds for eight bits on every device.
namespace bonfire::testing {

// Eight bits: what is quantized is near what was given, its transpose is its transpose, scales follow the recipe.
void expect_quantized_near(const KernelCheck& check);
// Weights in eight bits: parts of them are rounded as the whole is, and transposed.
void expect_scaled_weights_near(const KernelCheck& check);
// An activation that is rounded where it is made has the bits of one that is made first.
void expect_activations_rounded_at_once(const KernelCheck& check);
// Products in fp8, forward and backward, are near those in double; and follow them exactly where fp8 loses nothing.
void expect_fp8_products_near(const KernelCheck& check);

}  // namespace bonfire::testing
