#pragma once

#include <functional>
#include <set>
#include <vector>

#include <ATen/core/Tensor.h>

// One way to hold a function and its gradients to the same function of torch's operators in double.
namespace bonfire::testing {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

double tolerance_of(at::ScalarType type);

struct KernelCheck {
  at::ScalarType type;
  c10::Device device = c10::Device(c10::kCPU);
  std::set<std::size_t> kept_fp32{};  // inputs that are not rounded to `type`, by number
};

// Compares `ours` on `device`, over inputs rounded to `type`, with `reference` on the CPU over the same numbers in double:
// the outputs, and the gradients of a random weighted sum of them.
void expect_follows(const Function& ours, const Function& reference, const Tensors& given, const KernelCheck& check);

}  // namespace bonfire::testing
