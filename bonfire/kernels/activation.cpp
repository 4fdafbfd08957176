#include "bonfire/kernels/activation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
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

template <class T>
BONFIRE_INLINE void swiglu_backward_loop(const T* __restrict d_out, const T* __restrict gate_up, T* __restrict d_gate_up,
                                         std::int64_t n) {
  using C = compute_t<T>;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gate = load(gate_up[i]), up = load(gate_up[n + i]), d = load(d_out[i]);
    const C sigmoid = C(1) / (C(1) + exponential(-gate));
    d_gate_up[i] = store<T>(d * up * sigmoid * (C(1) + gate * (C(1) - sigmoid)));
    d_gate_up[n + i] = store<T>(d * gate * sigmoid);
  }
}

// gelu(x) = x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), because 1 + tanh(u) = 2 sigmoid(2 u).
template <class T>
BONFIRE_INLINE void gelu_loop(const T* __restrict in, T* __restrict out, std::int64_t n) {
  using C = compute_t<T>;
  constexpr C k = C(1.5957691216057307117597842397375), cubic = C(0.044715);
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C x = load(in[i]);
    out[i] = store<T>(x / (C(1) + exponential(-k * (x + cubic * x * x * x))));
  }
}

template <class T>
BONFIRE_INLINE void gelu_backward_loop(const T* __restrict d_out, const T* __restrict in, T* __restrict dx, std::int64_t n) {
  using C = compute_t<T>;
  constexpr C k = C(1.5957691216057307117597842397375), cubic = C(0.044715);
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C x = load(in[i]);
    const C sigmoid = C(1) / (C(1) + exponential(-k * (x + cubic * x * x * x)));
    const C slope = k * (C(1) + C(3) * cubic * x * x);
    dx[i] = store<T>(load(d_out[i]) * sigmoid * (C(1) + x * (C(1) - sigmoid) * slope));
  }
}

#define BONFIRE_ACTIVATION_KERNELS(T)                                                                           \
  BONFIRE_CLONES void swiglu_row(const T* gate_up, T* out, std::int64_t n) { swiglu_loop<T>(gate_up, out, n); } \
  BONFIRE_CLONES void swiglu_backward_row(const T* d_out, const T* gate_up, T* d_gate_up, std::int64_t n) {     \
    swiglu_backward_loop<T>(d_out, gate_up, d_gate_up, n);                                                      \
  }                                                                                                             \
  BONFIRE_CLONES void gelu_rows(const T* in, T* out, std::int64_t n) { gelu_loop<T>(in, out, n); }              \
  BONFIRE_CLONES void gelu_backward_rows(const T* d_out, const T* in, T* dx, std::int64_t n) {                  \
    gelu_backward_loop<T>(d_out, in, dx, n);                                                                    \
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

Tensor swiglu_backward_cpu(const Tensor& given, const Tensor& gate_up) {
  const Tensor d_out = given.contiguous();
  Tensor d_gate_up = at::empty_like(gate_up);
  const std::int64_t n = d_out.size(-1), rows = n ? d_out.numel() / n : 0;
  cpu::dispatch_floating(gate_up.scalar_type(), "swiglu_backward", [&](auto t) {
    using T = decltype(t);
    const T *d = d_out.const_data_ptr<T>(), *in = gate_up.const_data_ptr<T>();
    T* to = d_gate_up.data_ptr<T>();
    at::parallel_for(0, rows, cpu::grain(n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row)
        swiglu_backward_row(d + row * n, in + 2 * row * n, to + 2 * row * n, n);
    });
  });
  return d_gate_up;
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

Tensor gelu_backward_cpu(const Tensor& given, const Tensor& x) {
  const Tensor d_out = given.contiguous();
  Tensor dx = at::empty_like(x);
  cpu::dispatch_floating(x.scalar_type(), "gelu_backward", [&](auto t) {
    using T = decltype(t);
    const T *d = d_out.const_data_ptr<T>(), *in = x.const_data_ptr<T>();
    T* to = dx.data_ptr<T>();
    at::parallel_for(0, x.numel(), 16384, [&](std::int64_t begin, std::int64_t end) {
      gelu_backward_rows(d + begin, in + begin, to + begin, end - begin);
    });
  });
  return dx;
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
  const Tensor d_gate = sigmoid.neg().add_(1).mul_(gate).add_(1).mul_(sigmoid).mul_(up).mul_(d);
  return at::cat({d_gate, gate.mul(sigmoid).mul_(d)}, -1).to(gate_up.scalar_type());
}

Tensor gelu_composite(const Tensor& x) { return at::gelu(x, "tanh"); }
Tensor gelu_backward_composite(const Tensor& d_out, const Tensor& x) { return at::gelu_backward(d_out, x, "tanh"); }

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

}  // namespace

Tensor swiglu(const Tensor& gate_up) {
  require(gate_up.dim() > 0 && gate_up.size(-1) % 2 == 0, "swiglu: the last dimension must hold gates and ups; it is {}",
          gate_up.dim() ? gate_up.size(-1) : 0);
  return unary<SwigluNode>(BONFIRE_OPERATOR("bonfire::swiglu", Unary), gate_up);
}

Tensor gelu(const Tensor& x) { return unary<GeluNode>(BONFIRE_OPERATOR("bonfire::gelu", Unary), x); }

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("swiglu", swiglu_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
  m.impl("gelu", gelu_cpu);
  m.impl("gelu_backward", gelu_backward_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("swiglu", swiglu_composite);
  m.impl("swiglu_backward", swiglu_backward_composite);
  m.impl("gelu", gelu_composite);
  m.impl("gelu_backward", gelu_backward_composite);
}

}  // namespace bonfire
