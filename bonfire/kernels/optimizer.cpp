#include "bonfire/kernels/optimizer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using OptionalTensor = std::optional<Tensor>;

constexpr std::int64_t kGrain = 32768;

// Element-wise constants of an Adam step, in the type that the loop computes in.
template <class C>
struct AdamConstants {
  C scale, decay, keep, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps;
};

template <class C, class G>
BONFIRE_INLINE void adam_loop(C* __restrict p, const G* __restrict g, C* __restrict m, C* __restrict v, std::int64_t n,
                              const AdamConstants<C>& k) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gradient = static_cast<C>(load(g[i])) * k.scale + k.decay * p[i];
    const C first = k.beta1 * m[i] + k.one_minus_beta1 * gradient;
    const C second = k.beta2 * v[i] + k.one_minus_beta2 * gradient * gradient;
    m[i] = first;
    v[i] = second;
    p[i] = p[i] * k.keep - k.step_size * first / (std::sqrt(second) / k.root_correction + k.eps);
  }
}

template <class C, class G>
BONFIRE_INLINE void amsgrad_loop(C* __restrict p, const G* __restrict g, C* __restrict m, C* __restrict v, C* __restrict top,
                                 std::int64_t n, const AdamConstants<C>& k) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gradient = static_cast<C>(load(g[i])) * k.scale + k.decay * p[i];
    const C first = k.beta1 * m[i] + k.one_minus_beta1 * gradient;
    const C second = k.beta2 * v[i] + k.one_minus_beta2 * gradient * gradient;
    const C largest = top[i] < second ? second : top[i];
    m[i] = first;
    v[i] = second;
    top[i] = largest;
    p[i] = p[i] * k.keep - k.step_size * first / (std::sqrt(largest) / k.root_correction + k.eps);
  }
}

template <class C>
struct SgdConstants {
  C scale, decay, lr;
  C old, fresh;     // the new momentum is old times the old one and fresh times the gradient
  C ahead, weight;  // the direction is ahead times the gradient and weight times the new momentum
};

template <class C, class G>
BONFIRE_INLINE void sgd_loop(C* __restrict p, const G* __restrict g, std::int64_t n, const SgdConstants<C>& k) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) p[i] -= k.lr * (static_cast<C>(load(g[i])) * k.scale + k.decay * p[i]);
}

template <class C, class G>
BONFIRE_INLINE void momentum_loop(C* __restrict p, const G* __restrict g, C* __restrict m, std::int64_t n,
                                  const SgdConstants<C>& k) {
  // At the first step, when it may hold anything, the buffer is not read.
  const bool first = k.old == C(0);
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const C gradient = static_cast<C>(load(g[i])) * k.scale + k.decay * p[i];
    const C moved = (first ? C(0) : k.old * m[i]) + k.fresh * gradient;
    m[i] = moved;
    p[i] -= k.lr * (k.ahead * gradient + k.weight * moved);
  }
}

template <class T, class C>
BONFIRE_INLINE void copy_loop(T* __restrict out, const C* __restrict in, std::int64_t n) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = cpu::store<T>(static_cast<compute_t<T>>(in[i]));
}

#define BONFIRE_STEP_KERNELS(C, G)                                                                                    \
  BONFIRE_CLONES void adam_rows(C* p, const G* g, C* m, C* v, std::int64_t n, const AdamConstants<C>& k) {            \
    adam_loop(p, g, m, v, n, k);                                                                                      \
  }                                                                                                                   \
  BONFIRE_CLONES void amsgrad_rows(C* p, const G* g, C* m, C* v, C* top, std::int64_t n, const AdamConstants<C>& k) { \
    amsgrad_loop(p, g, m, v, top, n, k);                                                                              \
  }                                                                                                                   \
  BONFIRE_CLONES void sgd_rows(C* p, const G* g, std::int64_t n, const SgdConstants<C>& k) { sgd_loop(p, g, n, k); }  \
  BONFIRE_CLONES void momentum_rows(C* p, const G* g, C* m, std::int64_t n, const SgdConstants<C>& k) {               \
    momentum_loop(p, g, m, n, k);                                                                                     \
  }                                                                                                                   \
  BONFIRE_CLONES void copy_rows(G* out, const C* in, std::int64_t n) { copy_loop(out, in, n); }

BONFIRE_STEP_KERNELS(float, float)
BONFIRE_STEP_KERNELS(float, double)
BONFIRE_STEP_KERNELS(float, c10::BFloat16)
BONFIRE_STEP_KERNELS(float, c10::Half)
BONFIRE_STEP_KERNELS(double, float)
BONFIRE_STEP_KERNELS(double, double)
BONFIRE_STEP_KERNELS(double, c10::BFloat16)
BONFIRE_STEP_KERNELS(double, c10::Half)

// Calls `body(C{}, G{})` with the parameters' and the gradients' element types.
template <class Body>
void dispatch_step(const char* kernel, const Tensor& parameters, const Tensor& gradients, const Body& body) {
  cpu::dispatch_floating(gradients.scalar_type(), kernel, [&](auto g) {
    if (parameters.scalar_type() == at::kDouble)
      body(double{}, g);
    else
      body(float{}, g);
  });
}

void write_low_precision(const OptionalTensor& low, const Tensor& parameters, std::int64_t begin, std::int64_t end) {
  if (!low) return;
  dispatch_step("low_precision", parameters, *low, [&](auto c, auto t) {
    copy_rows(low->data_ptr<decltype(t)>() + begin, parameters.const_data_ptr<decltype(c)>() + begin, end - begin);
  });
}

double whole_scale(double scale, const OptionalTensor& tensor) { return tensor ? scale * tensor->item<double>() : scale; }

bool changes_nothing(const OptionalTensor& scale) { return scale && std::isnan(scale->item<double>()); }

// Those in the tensor, or else `step`. From another device the host waits for them.
StepNumbers read_numbers(const OptionalTensor& given, at::ArrayRef<double> step) {
  const Tensor here = given ? given->cpu() : Tensor();
  StepNumbers numbers;
  std::copy_n(given ? here.const_data_ptr<double>() : step.data(), numbers.size(), numbers.begin());
  return numbers;
}

void adam_cpu(Tensor p, const Tensor& g, Tensor m, Tensor v, const OptionalTensor& top, const OptionalTensor& low,
              const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (changes_nothing(scale_tensor)) return;
  const StepNumbers n = read_numbers(numbers, step);
  dispatch_step("adam_", p, g, [&](auto c, auto t) {
    using C = decltype(c);
    using G = decltype(t);
    const AdamConstants<C> k{.scale = static_cast<C>(whole_scale(n[0], scale_tensor)),
                             .decay = static_cast<C>(n[1]),
                             .keep = static_cast<C>(n[2]),
                             .beta1 = static_cast<C>(n[3]),
                             .one_minus_beta1 = static_cast<C>(1 - n[3]),
                             .beta2 = static_cast<C>(n[4]),
                             .one_minus_beta2 = static_cast<C>(1 - n[4]),
                             .step_size = static_cast<C>(n[5]),
                             .root_correction = static_cast<C>(n[6]),
                             .eps = static_cast<C>(n[7])};
    C* pp = p.data_ptr<C>();
    const G* gp = g.const_data_ptr<G>();
    C* mp = m.data_ptr<C>();
    C* vp = v.data_ptr<C>();
    C* tp = top ? top->data_ptr<C>() : nullptr;
    at::parallel_for(0, p.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      // Short runs, so that the low-precision copy reads parameters that are still in the cache.
      for (std::int64_t at = begin; at < end; at += 4096) {
        const std::int64_t count = std::min<std::int64_t>(4096, end - at);
        if (tp)
          amsgrad_rows(pp + at, gp + at, mp + at, vp + at, tp + at, count, k);
        else
          adam_rows(pp + at, gp + at, mp + at, vp + at, count, k);
        write_low_precision(low, p, at, at + count);
      }
    });
  });
}

void sgd_cpu(Tensor p, const Tensor& g, const OptionalTensor& buffer, const OptionalTensor& low,
             const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (changes_nothing(scale_tensor)) return;
  const StepNumbers n = read_numbers(numbers, step);
  dispatch_step("sgd_", p, g, [&](auto c, auto t) {
    using C = decltype(c);
    using G = decltype(t);
    const SgdConstants<C> k{.scale = static_cast<C>(whole_scale(n[0], scale_tensor)),
                            .decay = static_cast<C>(n[1]),
                            .lr = static_cast<C>(n[2]),
                            .old = static_cast<C>(n[3]),
                            .fresh = static_cast<C>(n[4]),
                            .ahead = static_cast<C>(n[5]),
                            .weight = static_cast<C>(n[6])};
    C* pp = p.data_ptr<C>();
    const G* gp = g.const_data_ptr<G>();
    C* mp = buffer ? buffer->data_ptr<C>() : nullptr;
    at::parallel_for(0, p.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin; at < end; at += 4096) {
        const std::int64_t count = std::min<std::int64_t>(4096, end - at);
        if (mp)
          momentum_rows(pp + at, gp + at, mp + at, count, k);
        else
          sgd_rows(pp + at, gp + at, count, k);
        write_low_precision(low, p, at, at + count);
      }
    });
  });
}

// The same steps out of torch's operators, for devices without a kernel of ours.
Tensor scaled_gradient(const Tensor& p, const Tensor& g, const OptionalTensor& scale_tensor, double scale) {
  Tensor gradient = g.to(p.scalar_type()).mul(scale);
  if (scale_tensor) gradient.mul_(scale_tensor->to(p.scalar_type()));
  return gradient;
}

void adam_composite(Tensor p, const Tensor& g, Tensor m, Tensor v, const OptionalTensor& top, const OptionalTensor& low,
                    const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (changes_nothing(scale_tensor)) return;
  const StepNumbers n = read_numbers(numbers, step);
  Tensor gradient = scaled_gradient(p, g, scale_tensor, n[0]);
  if (n[1] != 0) gradient.add_(p, n[1]);
  if (n[2] != 1) p.mul_(n[2]);
  m.mul_(n[3]).add_(gradient, 1 - n[3]);
  v.mul_(n[4]).addcmul_(gradient, gradient, 1 - n[4]);
  if (top) top->copy_(at::maximum(*top, v));
  p.addcdiv_(m, (top ? *top : v).sqrt().div_(n[6]).add_(n[7]), -n[5]);
  if (low) low->copy_(p);
}

void sgd_composite(Tensor p, const Tensor& g, const OptionalTensor& buffer, const OptionalTensor& low,
                   const OptionalTensor& scale_tensor, const OptionalTensor& numbers, at::ArrayRef<double> step) {
  if (changes_nothing(scale_tensor)) return;
  const StepNumbers n = read_numbers(numbers, step);
  Tensor gradient = scaled_gradient(p, g, scale_tensor, n[0]).add_(p, n[1]);
  Tensor direction = gradient;
  if (buffer) {
    if (n[3] == 0)
      buffer->copy_(gradient.mul(n[4]));
    else
      buffer->mul_(n[3]).add_(gradient, n[4]);
    direction = n[5] != 0 ? gradient.mul(n[5]).add_(*buffer, n[6]) : *buffer;
  }
  p.add_(direction, -n[2]);
  if (low) low->copy_(p);
}

OptionalTensor optional(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

void check(const char* kernel, const char* what, const Tensor& parameters, const Tensor& buffer) {
  require(buffer.is_contiguous() && buffer.numel() == parameters.numel(),
          "{}: {} has {} elements{}, the parameters have {}; allowed: contiguous buffers of one size", kernel, what,
          buffer.numel(), buffer.is_contiguous() ? "" : " and is not contiguous", parameters.numel());
  require(buffer.device() == parameters.device(), "{}: {} is on {}, the parameters are on {}; allowed: one device", kernel,
          what, buffer.device().str(), parameters.device().str());
}

void check_state(const char* kernel, const char* what, const Tensor& parameters, const Tensor& buffer) {
  check(kernel, what, parameters, buffer);
  require(buffer.scalar_type() == parameters.scalar_type(), "{}: {} is {}, the parameters are {}; allowed: one type", kernel,
          what, c10::toString(buffer.scalar_type()), c10::toString(parameters.scalar_type()));
}

void check_parameters(const char* kernel, const Tensor& parameters, const Tensor& gradients, const Tensor& low) {
  require(parameters.scalar_type() == at::kFloat || parameters.scalar_type() == at::kDouble,
          "{}: the parameters are {}; allowed: Float, Double", kernel, c10::toString(parameters.scalar_type()));
  check(kernel, "the parameters", parameters, parameters);
  check(kernel, "the gradient", parameters, gradients);
  if (low.defined()) check(kernel, "the low-precision copy", parameters, low);
}

void check_numbers(const char* kernel, const Tensor& parameters, const Tensor& scale, const Tensor& numbers) {
  require(!scale.defined() || (scale.numel() == 1 && scale.device() == parameters.device()),
          "{}: the gradient's scale has {} elements on {}; allowed: one, on {}", kernel, scale.defined() ? scale.numel() : 0,
          scale.defined() ? scale.device().str() : "", parameters.device().str());
  if (!numbers.defined()) return;
  require(numbers.scalar_type() == at::kDouble && numbers.is_contiguous() && numbers.device() == parameters.device() &&
              numbers.numel() == static_cast<std::int64_t>(step_numbers),
          "{}: the step's numbers are {} of {} on {}; allowed: {} of Double on {}", kernel, numbers.numel(),
          c10::toString(numbers.scalar_type()), numbers.device().str(), step_numbers, parameters.device().str());
}

}  // namespace

StepNumbers numbers_of(const AdamStep& s) {
  const auto step = static_cast<double>(s.step);
  return {s.maximize ? -s.gradient_scale : s.gradient_scale,
          s.decoupled ? 0 : s.weight_decay,
          s.decoupled ? 1 - s.lr * s.weight_decay : 1,
          s.beta1,
          s.beta2,
          s.lr / (1 - std::pow(s.beta1, step)),
          std::sqrt(1 - std::pow(s.beta2, step)),
          s.eps};
}

StepNumbers numbers_of(const SgdStep& s) {
  const bool first = s.step == 1;
  return {s.maximize ? -s.gradient_scale : s.gradient_scale,
          s.weight_decay,
          s.lr,
          first ? 0 : s.momentum,
          first ? 1 : 1 - s.dampening,
          s.nesterov ? 1.0 : 0.0,
          s.nesterov ? s.momentum : 1,
          0};
}

namespace {

void check(const AdamBuffers& b) {
  check_parameters("adam_", b.parameters, b.gradients, b.low_precision);
  check_state("adam_", "exp_avg", b.parameters, b.exp_avg);
  check_state("adam_", "exp_avg_sq", b.parameters, b.exp_avg_sq);
  if (b.max_exp_avg_sq.defined()) check_state("adam_", "max_exp_avg_sq", b.parameters, b.max_exp_avg_sq);
  check_numbers("adam_", b.parameters, b.gradient_scale, b.numbers);
}

const auto& adam_operator() { return BONFIRE_OPERATOR("bonfire::adam_", decltype(adam_composite)); }

// For devices without a kernel that takes all of them: one after the other.
void adam_all_composite(at::TensorList p, at::TensorList g, at::TensorList m, at::TensorList v, at::TensorList top,
                        at::TensorList low, at::TensorList scale_tensors, at::TensorList numbers,
                        at::ArrayRef<double> steps) {
  const auto given = [](at::TensorList all, std::size_t at) {
    return all.empty() || all[at].numel() == 0 ? OptionalTensor() : OptionalTensor(all[at]);
  };
  for (std::size_t at = 0; at < p.size(); ++at)
    adam_operator().call(p[at], g[at], m[at], v[at], given(top, at), given(low, at), given(scale_tensors, at),
                         given(numbers, at), steps.slice(at * step_numbers, step_numbers));
}

}  // namespace

void adam_(const AdamBuffers& b, const AdamStep& s) {
  check(b);
  adam_operator().call(b.parameters, b.gradients, b.exp_avg, b.exp_avg_sq, optional(b.max_exp_avg_sq),
                       optional(b.low_precision), optional(b.gradient_scale), optional(b.numbers), numbers_of(s));
}

void adam_(std::span<const AdamBuffers> buffers, std::span<const AdamStep> steps) {
  require(buffers.size() == steps.size(), "adam_: {} buffers and {} steps; allowed: a step for each", buffers.size(),
          steps.size());
  if (buffers.empty()) return;
  // Of what only some have, the others have an empty one; of what none has, there is no list.
  const auto list = [&](Tensor AdamBuffers::*which) {
    std::vector<Tensor> all;
    const bool any = std::any_of(buffers.begin(), buffers.end(), [&](const auto& b) { return (b.*which).defined(); });
    for (const AdamBuffers& b : buffers)
      if (any) all.push_back((b.*which).defined() ? b.*which : b.parameters.narrow(0, 0, 0));
    return all;
  };
  for (const AdamBuffers& b : buffers) {
    check(b);
    require(b.parameters.device() == buffers[0].parameters.device(), "adam_: parameters on {} and {}; allowed: one device",
            buffers[0].parameters.device().str(), b.parameters.device().str());
  }
  std::vector<double> numbers;
  for (const AdamStep& step : steps) {
    const StepNumbers own = numbers_of(step);
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  BONFIRE_OPERATOR("bonfire::adam_all_", decltype(adam_all_composite))
      .call(list(&AdamBuffers::parameters), list(&AdamBuffers::gradients), list(&AdamBuffers::exp_avg),
            list(&AdamBuffers::exp_avg_sq), list(&AdamBuffers::max_exp_avg_sq), list(&AdamBuffers::low_precision),
            list(&AdamBuffers::gradient_scale), list(&AdamBuffers::numbers), numbers);
}

void sgd_(const SgdBuffers& b, const SgdStep& s) {
  check_parameters("sgd_", b.parameters, b.gradients, b.low_precision);
  require(s.momentum == 0 || b.momentum.defined(), "sgd_: the momentum is {} and there is no buffer for it", s.momentum);
  const bool with_momentum = s.momentum != 0;
  if (with_momentum) check_state("sgd_", "the momentum", b.parameters, b.momentum);
  check_numbers("sgd_", b.parameters, b.gradient_scale, b.numbers);
  BONFIRE_OPERATOR("bonfire::sgd_", decltype(sgd_composite))
      .call(b.parameters, b.gradients, with_momentum ? optional(b.momentum) : std::nullopt, optional(b.low_precision),
            optional(b.gradient_scale), optional(b.numbers), numbers_of(s));
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("adam_", adam_cpu);
  m.impl("sgd_", sgd_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("adam_", adam_composite);
  m.impl("adam_all_", adam_all_composite);
  m.impl("sgd_", sgd_composite);
}

}  // namespace bonfire
