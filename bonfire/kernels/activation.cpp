#include "bonfire/kernels/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/agreed_math.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using TwoTensors = std::tuple<Tensor, Tensor>;
using cpu::compute_t;
using cpu::exponential;
using cpu::load;
using cpu::store;

template <class T>
BONFIRE_INLINE void swiglu_loop(const T* __restrict gate_up, T* __restrict out, std::int64_t n) {
  using C = compute_t<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gate = load(gate_up[i]), up = load(gate_up[n + i]);
    out[i] = store<T>(gate / (C(1) + exponential(-gate)) * up);
  }
}

// With `again` the activation takes the place of its gradient.
template <class T, bool again>
BONFIRE_INLINE void swiglu_backward_loop(T* __restrict d_out, const T* __restrict gate_up, T* __restrict d_gate_up,
                                         std::int64_t n) {
  using C = compute_t<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gate = load(gate_up[i]), up = load(gate_up[n + i]), d = load(d_out[i]);
    const C divisor = C(1) + exponential(-gate), sigmoid = C(1) / divisor;
    d_gate_up[i] = store<T>(silu_slope(gate, sigmoid) * up * d);
    d_gate_up[n + i] = store<T>(gate * sigmoid * d);
    if (again) d_out[i] = store<T>(gate / divisor * up);
  }
}

// gelu(x) = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2 u).
template <class C>
struct Gelu {
  static constexpr C k = C(1.5957691216057307117597842397375), cubic = C(0.044715);
  // At 32 the sigmoid is 0 or 1 in every type. A square that goes on to infinity would make 0 times infinity of the slope.
  static BONFIRE_INLINE C square(C x) { return x * x < C(1024) ? x * x : C(1024); }
  static BONFIRE_INLINE C divisor(C x) { return C(1) + exponential(-k * x * (C(1) + cubic * square(x))); }
  static BONFIRE_INLINE C slope(C x, C divisor) {
    const C sigmoid = C(1) / divisor;
    return sigmoid + (sigmoid - sigmoid * sigmoid) * x * (k + C(3) * k * cubic * square(x));
  }
};

template <class T>
BONFIRE_INLINE void gelu_loop(const T* __restrict in, T* __restrict out, std::int64_t n) {
  using C = compute_t<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C x = load(in[i]);
    out[i] = store<T>(x / Gelu<C>::divisor(x));
  }
}

template <class T, bool again>
BONFIRE_INLINE void gelu_backward_loop(T* __restrict d_out, const T* __restrict in, T* __restrict dx, std::int64_t n) {
  using C = compute_t<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C x = load(in[i]), divisor = Gelu<C>::divisor(x);
    dx[i] = store<T>(load(d_out[i]) * Gelu<C>::slope(x, divisor));
    if (again) d_out[i] = store<T>(x / divisor);
  }
}

#define BONFIRE_ACTIVATION_KERNELS(T)                                                                           \
  BONFIRE_CLONES void swiglu_row(const T* gate_up, T* out, std::int64_t n) { swiglu_loop<T>(gate_up, out, n); } \
  BONFIRE_CLONES void swiglu_backward_row(const T* d_out, const T* gate_up, T* d_gate_up, std::int64_t n) {     \
    swiglu_backward_loop<T, false>(const_cast<T*>(d_out), gate_up, d_gate_up, n);                               \
  }                                                                                                             \
  BONFIRE_CLONES void swiglu_exchange_row(T* d_out, const T* gate_up, T* d_gate_up, std::int64_t n) {           \
    swiglu_backward_loop<T, true>(d_out, gate_up, d_gate_up, n);                                                \
  }                                                                                                             \
  BONFIRE_CLONES void gelu_rows(const T* in, T* out, std::int64_t n) { gelu_loop<T>(in, out, n); }              \
  BONFIRE_CLONES void gelu_backward_rows(const T* d_out, const T* in, T* dx, std::int64_t n) {                  \
    gelu_backward_loop<T, false>(const_cast<T*>(d_out), in, dx, n);                                             \
  }                                                                                                             \
  BONFIRE_CLONES void gelu_exchange_rows(T* d_out, const T* in, T* dx, std::int64_t n) {                        \
    gelu_backward_loop<T, true>(d_out, in, dx, n);                                                              \
  }

BONFIRE_ACTIVATION_KERNELS(float)
BONFIRE_ACTIVATION_KERNELS(double)
BONFIRE_ACTIVATION_KERNELS(c10::BFloat16)
BONFIRE_ACTIVATION_KERNELS(c10::Half)

Tensor swiglu_cpu(const Tensor& given) {
  const Tensor gate_up = given.contiguous();
  auto sizes = gate_up.sizes().vec();
  sizes.back() /= 2;
  Tensor out = at::empty(sizes, gate_up.options());
  const std::int64_t n = sizes.back(), rows = n ? out.numel() / n : 0;
  cpu::dispatch_floating(out.scalar_type(), "swiglu", [&](auto t) {
    using T = decltype(t);
    const T* in = gate_up.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    at::parallel_for(0, rows, cpu::grain(n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) swiglu_row(in + 2 * row * n, to + row * n, n);
    });
  });
  return out;
}

// With `again` d_out must be contiguous, and is overwritten.
template <bool again>
Tensor swiglu_backward_rows(const Tensor& d_out, const Tensor& gate_up) {
  Tensor d_gate_up = at::empty_like(gate_up);
  const std::int64_t n = d_out.size(-1), rows = n ? d_out.numel() / n : 0;
  cpu::dispatch_floating(gate_up.scalar_type(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    const T* in = gate_up.const_data_ptr<T>();
    T *d = const_cast<T*>(d_out.const_data_ptr<T>()), *to = d_gate_up.data_ptr<T>();
    at::parallel_for(0, rows, cpu::grain(n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        if constexpr (again)
          swiglu_exchange_row(d + row * n, in + 2 * row * n, to + 2 * row * n, n);
        else
          swiglu_backward_row(d + row * n, in + 2 * row * n, to + 2 * row * n, n);
    });
  });
  return d_gate_up;
}

Tensor swiglu_backward_cpu(const Tensor& d_out, const Tensor& gate_up) {
  return swiglu_backward_rows<false>(d_out.contiguous(), gate_up);
}

Tensor swiglu_exchange_cpu(Tensor d_out, const Tensor& gate_up) {
  require_contiguous({"activation", "d_out", d_out});
  return swiglu_backward_rows<true>(d_out, gate_up);
}

Tensor gelu_cpu(const Tensor& given) {
  const Tensor x = given.contiguous();
  Tensor out = at::empty_like(x);
  cpu::dispatch_floating(x.scalar_type(), "gelu", [&](auto t) {
    using T = decltype(t);
    const T* in = x.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    at::parallel_for(0, x.numel(), 16384,
                     [&](std::int64_t begin, std::int64_t end) { gelu_rows(in + begin, to + begin, end - begin); });
  });
  return out;
}

Tensor sums_of_columns(const Tensor& given) {
  const Tensor x = given.reshape({-1, given.size(-1)});
  if (x.element_size() > 2) return x.sum(0);
  // Torch widens what it sums: a few rows at a time.
  constexpr std::int64_t at_once = 256;
  Tensor sums = at::zeros({x.size(1)}, x.options().dtype(at::kFloat));
  for (std::int64_t begin = 0; begin < x.size(0); begin += at_once)
    sums.add_(x.narrow(0, begin, std::min(at_once, x.size(0) - begin)).sum(0, false, at::kFloat));
  return sums;
}

template <bool again>
Tensor gelu_backward_elements(const Tensor& d_out, const Tensor& x) {
  Tensor dx = at::empty_like(x);
  cpu::dispatch_floating(x.scalar_type(), "gelu_backward", [&](auto t) {
    using T = decltype(t);
    const T* in = x.const_data_ptr<T>();
    T *d = const_cast<T*>(d_out.const_data_ptr<T>()), *to = dx.data_ptr<T>();
    at::parallel_for(0, x.numel(), 16384, [&](std::int64_t begin, std::int64_t end) {
      if constexpr (again)
        gelu_exchange_rows(d + begin, in + begin, to + begin, end - begin);
      else
        gelu_backward_rows(d + begin, in + begin, to + begin, end - begin);
    });
  });
  return dx;
}

Tensor gelu_backward_cpu(const Tensor& d_out, const Tensor& x) {
  return gelu_backward_elements<false>(d_out.contiguous(), x);
}

TwoTensors gelu_exchange_cpu(Tensor d_out, const Tensor& x) {
  require_contiguous({"activation", "d_out", d_out});
  const Tensor dx = gelu_backward_elements<true>(d_out, x);
  return {dx, sums_of_columns(dx)};
}

TwoTensors gelu_sums_cpu(const Tensor& d_out, const Tensor& x) {
  const Tensor dx = gelu_backward_cpu(d_out, x);
  return {dx, sums_of_columns(dx)};
}

Tensor swiglu_composite(const Tensor& gate_up) {
  const std::int64_t n = gate_up.size(-1) / 2;
  return at::silu(gate_up.narrow(-1, 0, n)).mul_(gate_up.narrow(-1, n, n));
}

Tensor swiglu_backward_composite(const Tensor& d_out, const Tensor& gate_up) {
  const std::int64_t n = d_out.size(-1);
  const auto wide = gate_up.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor gate = gate_up.narrow(-1, 0, n).to(wide), up = gate_up.narrow(-1, n, n).to(wide), d = d_out.to(wide);
  const Tensor sigmoid = at::sigmoid(gate);
  const Tensor d_gate = silu_slope(gate, sigmoid).mul_(up).mul_(d);
  return at::cat({d_gate, gate.mul(sigmoid).mul_(d)}, -1).to(gate_up.scalar_type());
}

Tensor gelu_composite(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor gelu_backward_composite(const Tensor& d_out, const Tensor& x) { return at::gelu_backward(d_out, x, "tanh"); }

Tensor swiglu_exchange_composite(Tensor d_out, const Tensor& gate_up) {
  const Tensor d = swiglu_backward_composite(d_out, gate_up);
  d_out.copy_(swiglu_composite(gate_up));
  return d;
}

TwoTensors gelu_exchange_composite(Tensor d_out, const Tensor& x) {
  const Tensor dx = gelu_backward_composite(d_out, x);
  d_out.copy_(gelu_composite(x));
  return {dx, sums_of_columns(dx)};
}

TwoTensors gelu_sums_composite(const Tensor& d_out, const Tensor& x) {
  const Tensor dx = gelu_backward_composite(d_out, x);
  return {dx, sums_of_columns(dx)};
}

using Unary = Tensor(const Tensor&);
using UnaryBackward = Tensor(const Tensor&, const Tensor&);

struct SwigluNode : BackwardNode {
  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    return {BONFIRE_OPERATOR("bonfire::swiglu_backward", UnaryBackward).call(gradients[0], saved(0))};
  }
};

struct GeluNode : BackwardNode {
  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    return {BONFIRE_OPERATOR("bonfire::gelu_backward", UnaryBackward).call(gradients[0], saved(0))};
  }
};

template <class Node>
Tensor unary(const c10::TypedOperatorHandle<Unary>& op, const Tensor& given) {
  const Tensor x = given.contiguous();
  auto node = make_node<Node>(x);
  Tensor out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    out = op.call(x);
  }
  if (node) {
    node->save(x);
    torch::autograd::set_history(out, node);
  }
  return out;
}

using Exchange = Tensor(Tensor, const Tensor&);
using ExchangeAndSum = TwoTensors(Tensor, const Tensor&);
using BackwardAndSum = TwoTensors(const Tensor&, const Tensor&);

std::int64_t activated_columns(const Argument& wide, Activation activation) {
  require_rows(wide);
  return activation == Activation::swiglu ? require_halves(wide) : wide.tensor.size(-1);
}

void require_gradient(Activation activation, const Tensor& d_out, const Tensor& wide) {
  auto sizes = wide.sizes().vec();
  sizes.back() = activated_columns({"activate_backward", "wide", wide}, activation);
  require_sizes({"activate_backward", "d_out", d_out}, sizes, wide);
  require(d_out.scalar_type() == wide.scalar_type(), "activate_backward: d_out is {}, wide is {}; allowed: one type",
          c10::toString(d_out.scalar_type()), c10::toString(wide.scalar_type()));
  require_contiguous({"activate_backward", "d_out", d_out});
  require_contiguous({"activate_backward", "wide", wide});
}

}  // namespace

Tensor activate(Activation activation, const Tensor& wide) {
  activated_columns({"activate", "wide", wide}, activation);
  require_contiguous({"activate", "wide", wide});
  return activation == Activation::swiglu ? BONFIRE_OPERATOR("bonfire::swiglu", Unary).call(wide)
                                          : BONFIRE_OPERATOR("bonfire::gelu", Unary).call(wide);
}

ActivationGradient activate_backward(Activation activation, const Tensor& d_out, const Tensor& wide) {
  require_gradient(activation, d_out, wide);
  if (activation == Activation::swiglu)
    return {BONFIRE_OPERATOR("bonfire::swiglu_backward", UnaryBackward).call(d_out, wide), {}};
  auto [d, sums] = BONFIRE_OPERATOR("bonfire::gelu_backward_sums", BackwardAndSum).call(d_out, wide);
  return {d, sums};
}

ActivationGradient activate_exchange(Activation activation, const Tensor& d_out, const Tensor& wide) {
  require_gradient(activation, d_out, wide);
  if (activation == Activation::swiglu)
    return {BONFIRE_OPERATOR("bonfire::swiglu_backward_", Exchange).call(d_out, wide), {}};
  auto [d, sums] = BONFIRE_OPERATOR("bonfire::gelu_backward_", ExchangeAndSum).call(d_out, wide);
  return {d, sums};
}

Tensor swiglu(const Tensor& gate_up) {
  require_halves({"swiglu", "its input", gate_up});
  return unary<SwigluNode>(BONFIRE_OPERATOR("bonfire::swiglu", Unary), gate_up);
}

Tensor gelu(const Tensor& x) { return unary<GeluNode>(BONFIRE_OPERATOR("bonfire::gelu", Unary), x); }

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("swiglu", swiglu_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
  m.impl("gelu", gelu_cpu);
  m.impl("gelu_backward", gelu_backward_cpu);
  m.impl("swiglu_backward_", swiglu_exchange_cpu);
  m.impl("gelu_backward_", gelu_exchange_cpu);
  m.impl("gelu_backward_sums", gelu_sums_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("swiglu", swiglu_composite);
  m.impl("swiglu_backward", swiglu_backward_composite);
  m.impl("gelu", gelu_composite);
  m.impl("gelu_backward", gelu_backward_composite);
  m.impl("swiglu_backward_", swiglu_exchange_composite);
  m.impl("gelu_backward_", gelu_exchange_composite);
  m.impl("gelu_backward_sums", gelu_sums_composite);
  m.impl("column_sums", sums_of_columns);
}

}  // namespace bonfire
