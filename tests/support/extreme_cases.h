#pragma once

#include "tests/support/kernel_check.h"

// What holds where numbers are many, large, tiny or none, on every device.
namespace bonfire::testing {

// Sums over thousands of rows in bf16 and fp16 are made in fp32 and rounded once. REQUIRES: such a type.
void expect_sums_are_rounded_once(const KernelCheck& check);
// SwiGLU and GELU, forward and backward, over all magnitudes that the type has, against long doubles.
void expect_activations_right_everywhere(const KernelCheck& check);
// Of no target the mean is no number, the sum 0, and both gradients are 0.
void expect_ignored_targets_give_nothing(const KernelCheck& check);

}  // namespace bonfire::testing
