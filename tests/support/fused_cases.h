#pragma once

#include "tests/support/kernel_check.h"

// What holds for fused products on every device.
namespace bonfire::testing {

// Forward and backward against torch's operators in double, over odd shapes, with and without biases and residuals.
void expect_fused_products_follow(const KernelCheck& check);
// What a layer makes again in backward has the bits that forward had: gradients are those of the layers one by one.
void expect_fused_products_equal_their_parts(const KernelCheck& check);
// Gradients of biases, however the sums that they are came about.
void expect_bias_gradients_follow(const KernelCheck& check);
// Gradients of what is trained do not change when the rest is frozen.
void expect_freezing_changes_nothing_else(const KernelCheck& check);

}  // namespace bonfire::testing
