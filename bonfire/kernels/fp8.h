#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/repeated_scales.h"
#include "bonfire/kernels/scaled_weight.h"

// Products of numbers with eight bits. What is multiplied is first scaled so that it fills their range: inputs and weights
// as e4m3 (4 bits of exponent), gradients as e5m2 (5 bits). Sums are made in fp32, results have the type of what came in.
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

// Where the magnitudes are found that a tensor is scaled by before it is made, and where its own goes: see fp8_quantize.
struct KnownScale {
  at::Tensor history;
  std::int64_t position = 0;
  at::Tensor later{};
};

// The products of one layer, and what it remembers of the magnitudes of its input, weight and gradient. A weight in two
// bytes is rounded in every call; one that is in eight bits already is read as it is.
class BONFIRE_API Fp8Product {
 public:
  explicit Fp8Product(const Fp8Recipe& recipe) : recipe_(recipe) {}

  // Whether cuBLASLt takes such shapes: every dimension is a multiple of 16.
  static bool suits(const at::Tensor& rows, const at::Tensor& weight);

  // Where the scales of a weight in eight bits are found; null: it is in two bytes.
  std::shared_ptr<WeightScales>& weight_scales() { return scales_; }
  // The weight as a product without fp8 reads it: `weight` itself unless that is in eight bits.
  at::Tensor plain(const at::Tensor& weight, at::ScalarType type) const;

  struct Forward {
    at::Tensor out;
    Quantized x;  // transposed, where `keep`: what backward needs of x
  };
  // x weight^T + addends for x [rows, in] and weight [out, in].
  Forward forward(const at::Tensor& x, const at::Tensor& weight, const Addends& addends, bool keep);
  // The same of x in eight bits, as a result of this type.
  at::Tensor forward(const Quantized& x, const at::Tensor& weight, const Addends& addends, at::ScalarType type);

  // Whether the scale of the next input, or gradient, is known before it is made: whoever makes it can round it at once, and
  // then asks for the scale instead of handing the tensor in.
  bool knows_input() const { return knows(input); }
  bool knows_gradient() const { return knows(gradient_of_output); }
  KnownScale next_input() { return next(input); }
  KnownScale next_gradient() { return next(gradient_of_output); }

  // A gradient, once for the products it takes part in.
  Quantized gradient(const at::Tensor& dy);
  // dy weight, as a result of this type.
  at::Tensor input_gradient(const Quantized& dy, at::ScalarType type, const at::Tensor& weight);
  // dy^T x into the sink, or as a new tensor, as weight_gradient does it. `x` is what forward kept, or else `rows` is
  // scaled now. `plain_dy` is read where rows have scales of their own.
  at::Tensor weight_gradient(const Quantized& dy, const at::Tensor& plain_dy, const Quantized& x, const at::Tensor& rows,
                             const WeightGradientOptions& options);

  enum Role { input, weight, gradient_of_output, roles };
  // How often each was scaled. Calls that were captured once and are done again are counted apart, on the device: `later`,
  // one int64 for each role, is added wherever the number of a call matters.
  using Calls = std::array<std::int64_t, roles>;
  const Calls& calls() const { return calls_; }
  void set_calls(const Calls& calls) { calls_ = calls; }
  void set_later(const at::Tensor& later) { later_ = later; }

  // What it remembers, as numbers that can be kept: fp64 [roles, `remembered`], for each role the largest magnitudes of the
  // last calls and how many calls there were. Host: waits for the device.
  static constexpr std::int64_t remembered = 17;
  at::Tensor memory() const;
  // Goes on from there; nothing changes where there were no calls. REQUIRES: captured calls are not under way.
  void set_memory(const at::Tensor& memory, at::Device device);

 private:
  bool knows(Role role) const;
  RepeatedScales::Call next_call(Role role, bool measured);
  KnownScale next(Role role);
  Quantized quantize(Role role, const at::Tensor& x, bool values, bool transposed);
  // Of a weight in eight bits; undefined: of one in two bytes.
  at::Tensor known_scales(const at::Tensor& weight) const;

  Fp8Recipe recipe_;
  std::shared_ptr<WeightScales> scales_;
  std::array<at::Tensor, roles> history_;  // largest magnitudes of the last calls
  Calls calls_{};
  at::Tensor later_{};
};

}  // namespace bonfire
