#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/gradient_sink.h"

// Matrix products of layers, forward and backward.
namespace bonfire {

struct Addends {
  at::Tensor bias{};      // [columns]
  at::Tensor residual{};  // [rows, columns]
};

// a b for matrices, outside autograd; plus the addends where there are any.
BONFIRE_API at::Tensor product(const at::Tensor& a, const at::Tensor& b, const Addends& addends = {});

// out = a b, or out += a b. `out` may be fp32 for narrower inputs: the sum is then fp32's, and not rounded to their type.
enum class Writing { overwrite, add };
BONFIRE_API void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, Writing writing);

// [rows, columns] to [columns], in fp32 at least: the gradient of a bias.
BONFIRE_API at::Tensor column_sums(const at::Tensor& x);

struct WeightGradientOptions {
  GradientSink* sink = nullptr;
  at::ScalarType type = at::kFloat;
};

// dy^T x for dy [rows, out] and x [rows, in]: into the sink where there is one (the result is undefined then), otherwise as
// a new tensor of the given type.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const WeightGradientOptions& options);

class Fp8Product;

struct LinearOptions {
  at::Tensor bias{};      // [out]
  at::Tensor residual{};  // added to the result; of the result's shape
  std::shared_ptr<GradientSink> weight_sink{};
  std::shared_ptr<GradientSink> bias_sink{};
  std::shared_ptr<Fp8Product> fp8{};  // where given, products are made in fp8 if their shapes allow it
  bool keep = false;                  // of fused products: what the product reads is kept for backward instead of made again
};

// x weight^T + bias + residual for weight [out, in].
BONFIRE_API at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const LinearOptions& options);

}  // namespace bonfire
