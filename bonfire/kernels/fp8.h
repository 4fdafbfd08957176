#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/product.h"

// Products of numbers with eight bits. What is multiplied is first scaled so that it fills their range: inputs and weights as
// e4m3 (4 bits of exponent), gradients as e5m2 (5 bits). Sums are made in fp32, results have the type of what came in.
namespace bonfire {

enum class Fp8Scaling {
  delayed,  // by the largest magnitude of the last calls: a pass less over everything
  current   // by the largest magnitude of what is scaled
};
enum class Fp8Scales {
  tensor,  // one scale for all elements
  row      // one for each row of what is multiplied; gradients of weights are then made without fp8
};

struct Fp8Recipe {
  Fp8Scaling scaling = Fp8Scaling::delayed;
  Fp8Scales scales = Fp8Scales::tensor;
};

// [rows, columns] in eight bits: the elements, or those of the transpose, times `inverse` are what was given.
struct Quantized {
  at::Tensor values;      // [rows, columns], where asked for
  at::Tensor transposed;  // [columns, rows], where asked for
  at::Tensor inverse;     // fp32: one element, or one for each row
};

// The products of one layer, and what it remembers of the magnitudes of its input, weight and gradient.
class BONFIRE_API Fp8Product {
 public:
  explicit Fp8Product(const Fp8Recipe& recipe) : recipe_(recipe) {}

  // Whether cuBLASLt takes such shapes: every dimension is a multiple of 16.
  static bool suits(const at::Tensor& rows, const at::Tensor& weight);

  struct Forward {
    at::Tensor out;
    Quantized x;  // transposed, where `keep`: what backward needs of x
  };
  // x weight^T + addends for x [rows, in] and weight [out, in].
  Forward forward(const at::Tensor& x, const at::Tensor& weight, const Addends& addends, bool keep);

  // A gradient, once for the products it takes part in.
  Quantized gradient(const at::Tensor& dy);
  // dy weight.
  at::Tensor input_gradient(const Quantized& dy, const at::Tensor& weight);
  // dy^T x into the sink, or as a new tensor, as weight_gradient does it. `x` is what forward kept, or else `rows` is
  // scaled now.
  at::Tensor weight_gradient(const Quantized& dy, const at::Tensor& plain_dy, const Quantized& x, const at::Tensor& rows,
                             const WeightGradientOptions& options);

  enum Role { input, weight, gradient_of_output, roles };
  // How often each was scaled. Calls that were captured once and are done again are counted apart, on the device: `later`,
  // one int64 for each role, is added wherever the number of a call matters.
  using Calls = std::array<std::int64_t, roles>;
  const Calls& calls() const { return calls_; }
  void set_calls(const Calls& calls) { calls_ = calls; }
  void set_later(const at::Tensor& later) { later_ = later; }

 private:
  Quantized quantize(Role role, const at::Tensor& x, bool values, bool transposed);

  Fp8Recipe recipe_;
  std::array<at::Tensor, roles> history_;  // largest magnitudes of the last calls
  Calls calls_{};
  at::Tensor later_{};
};

}  // namespace bonfire
