#include "bonfire/kernels/qkv.h"

#include <cmath>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/known_sums.h"
#include "bonfire/kernels/operator.h"
#include "bonfire/kernels/product.h"
#include "bonfire/kernels/vectorize.h"

namespace bonfire {
namespace {

using at::Tensor;
using cpu::compute_t;
using cpu::load;
using cpu::store;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// `direction` is 1 to turn, -1 to turn back.
template <class T>
BONFIRE_INLINE void rotate_loop(const T* __restrict in, T* __restrict out, const compute_t<T>* __restrict cosine,
                                const compute_t<T>* __restrict sine, compute_t<T> direction, std::int64_t half) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const auto x = load(in[i]), y = load(in[half + i]), s = direction * sine[i];
    out[i] = store<T>(x * cosine[i] - y * s);
    out[half + i] = store<T>(y * cosine[i] + x * s);
  }
}

#define BONFIRE_ROTATE_KERNEL(T)                                                                            \
  BONFIRE_CLONES void rotate_row(const T* in, T* out, const compute_t<T>* cosine, const compute_t<T>* sine, \
                                 compute_t<T> direction, std::int64_t half) {                               \
    rotate_loop<T>(in, out, cosine, sine, direction, half);                                                 \
  }
BONFIRE_ROTATE_KERNEL(float)
BONFIRE_ROTATE_KERNEL(double)
BONFIRE_ROTATE_KERNEL(c10::BFloat16)
BONFIRE_ROTATE_KERNEL(c10::Half)

// Walks over one of q, k, v: `packed` is the element of head 0 in row (batch, sequence) 0 of the packed tensor.
template <class T>
struct Part {
  T* data;
  std::int64_t heads, stride_batch, stride_head, stride_sequence;
  std::int64_t first;  // column of head 0 in the packed tensor
  bool rotated;
};

template <class T>
Part<T> part(const Tensor& x, std::int64_t first, bool rotated) {
  return {const_cast<T*>(x.const_data_ptr<T>()), x.size(1), x.stride(0), x.stride(1), x.stride(2), first, rotated};
}

struct Walk {
  std::int64_t batch, sequence, head_dim, columns;
};

template <class T, bool pack>
void walk(const Walk& shape, std::array<Part<T>, 3> parts, T* packed, const compute_t<T>* cosine, const compute_t<T>* sine) {
  const std::int64_t size = shape.head_dim;
  at::parallel_for(0, shape.batch * shape.sequence, cpu::grain(shape.columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t b = row / shape.sequence, s = row % shape.sequence;
      for (const auto& p : parts)
        for (std::int64_t head = 0; head < p.heads; ++head) {
          T* inside = p.data + b * p.stride_batch + head * p.stride_head + s * p.stride_sequence;
          T* outside = packed + row * shape.columns + p.first + head * size;
          const T* from = pack ? inside : outside;
          T* to = pack ? outside : inside;
          if (p.rotated)
            rotate_row(from, to, cosine + s * size / 2, sine + s * size / 2, pack ? -1 : 1, size / 2);
          else
            std::copy(from, from + size, to);
        }
    }
  });
}

template <class T, bool pack>
void walk_all(const Tensor& packed, const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cosine,
              const OptionalTensor& sine) {
  const std::int64_t size = q.size(3), rotated = cosine.has_value();
  const Walk shape{q.size(0), q.size(2), size, packed.size(2)};
  walk<T, pack>(
      shape,
      {part<T>(q, 0, rotated), part<T>(k, q.size(1) * size, rotated), part<T>(v, (q.size(1) + k.size(1)) * size, false)},
      const_cast<T*>(packed.const_data_ptr<T>()), rotated ? cosine->const_data_ptr<compute_t<T>>() : nullptr,
      rotated ? sine->const_data_ptr<compute_t<T>>() : nullptr);
}

ThreeTensors split_cpu(const Tensor& given, const OptionalTensor& cosine, const OptionalTensor& sine, std::int64_t heads,
                       std::int64_t kv_heads) {
  const Tensor qkv = given.contiguous();
  const std::int64_t batch = qkv.size(0), sequence = qkv.size(1), size = qkv.size(2) / (heads + 2 * kv_heads);
  Tensor q = at::empty({batch, heads, sequence, size}, qkv.options());
  Tensor k = at::empty({batch, kv_heads, sequence, size}, qkv.options());
  Tensor v = at::empty({batch, kv_heads, sequence, size}, qkv.options());
  cpu::dispatch_floating(qkv.scalar_type(), "split_qkv",
                         [&](auto t) { walk_all<decltype(t), false>(qkv, q, k, v, cosine, sine); });
  return {q, k, v};
}

Tensor merge_cpu(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v, const OptionalTensor& cosine,
                 const OptionalTensor& sine) {
  const auto dense = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const Tensor q = dense(given_q), k = dense(given_k), v = dense(given_v);
  Tensor qkv = at::empty({q.size(0), q.size(2), (q.size(1) + 2 * k.size(1)) * q.size(3)}, q.options());
  cpu::dispatch_floating(q.scalar_type(), "merge_qkv",
                         [&](auto t) { walk_all<decltype(t), true>(qkv, q, k, v, cosine, sine); });
  return qkv;
}

Tensor rotate_composite(const Tensor& x, const OptionalTensor& cosine, const OptionalTensor& sine, double direction) {
  if (!cosine) return x.contiguous();
  const std::int64_t half = x.size(3) / 2, sequence = x.size(2);
  const Tensor c = cosine->narrow(0, 0, sequence), s = sine->narrow(0, 0, sequence).mul(direction);
  const Tensor a = x.narrow(3, 0, half).to(c.scalar_type()), b = x.narrow(3, half, half).to(c.scalar_type());
  return at::cat({a.mul(c).sub_(b.mul(s)), b.mul(c).add_(a.mul(s))}, 3).to(x.scalar_type());
}

ThreeTensors split_composite(const Tensor& qkv, const OptionalTensor& cosine, const OptionalTensor& sine, std::int64_t heads,
                             std::int64_t kv_heads) {
  const Tensor all = qkv.view({qkv.size(0), qkv.size(1), heads + 2 * kv_heads, -1}).transpose(1, 2);
  return {rotate_composite(all.narrow(1, 0, heads), cosine, sine, 1),
          rotate_composite(all.narrow(1, heads, kv_heads), cosine, sine, 1),
          all.narrow(1, heads + kv_heads, kv_heads).contiguous()};
}

Tensor merge_composite(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cosine,
                       const OptionalTensor& sine) {
  const Tensor all = at::cat({rotate_composite(q, cosine, sine, -1), rotate_composite(k, cosine, sine, -1), v}, 1);
  return all.transpose(1, 2).reshape({q.size(0), q.size(2), -1});
}

std::tuple<Tensor, Tensor> merge_sums_composite(const Tensor& q, const Tensor& k, const Tensor& v) {
  const Tensor qkv = BONFIRE_OPERATOR("bonfire::merge_qkv", Tensor(const Tensor&, const Tensor&, const Tensor&,
                                                                   const OptionalTensor&, const OptionalTensor&))
                         .call(q, k, v, std::nullopt, std::nullopt);
  return {qkv, column_sums(qkv.view({-1, qkv.size(-1)}))};
}

using Split = ThreeTensors(const Tensor&, const OptionalTensor&, const OptionalTensor&, std::int64_t, std::int64_t);
using SplitInPlace = ThreeTensors(Tensor, const OptionalTensor&, const OptionalTensor&, std::int64_t, std::int64_t);
using Merge = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&);

// Copying all the same: on the CPU q, k and v are contiguous.
ThreeTensors split_in_place_cpu(Tensor qkv, const OptionalTensor& cosine, const OptionalTensor& sine, std::int64_t heads,
                                std::int64_t kv_heads) {
  return split_cpu(qkv, cosine, sine, heads, kv_heads);
}
ThreeTensors split_in_place_composite(Tensor qkv, const OptionalTensor& cosine, const OptionalTensor& sine,
                                      std::int64_t heads, std::int64_t kv_heads) {
  return split_composite(qkv, cosine, sine, heads, kv_heads);
}

void turn_back_composite(Tensor qkv, const Tensor& cosine, const Tensor& sine, std::int64_t heads, std::int64_t kv_heads) {
  const Tensor turned = qkv.narrow(2, 0, qkv.size(2) / (heads + 2 * kv_heads) * (heads + kv_heads));
  const Tensor parts = turned.view({qkv.size(0), qkv.size(1), heads + kv_heads, -1}).transpose(1, 2);
  turned.copy_(rotate_composite(parts, cosine, sine, -1).transpose(1, 2).flatten(2));
}

OptionalTensor table(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

struct SplitNode : BackwardNode {
  RotaryTable rotary;
  std::shared_ptr<KnownSums> wanted;
  std::array<std::vector<std::int64_t>, 3> sizes;
  at::TensorOptions options;

  torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) override {
    const auto filled = [&](std::size_t i) { return gradients[i].defined() ? gradients[i] : at::zeros(sizes[i], options); };
    if (wanted && !rotary.cosine.defined()) {
      using MergeSums = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);
      std::tie(wanted->gradient, wanted->sums) =
          BONFIRE_OPERATOR("bonfire::merge_qkv_sums", MergeSums).call(filled(0), filled(1), filled(2));
      return {wanted->gradient};
    }
    return {BONFIRE_OPERATOR("bonfire::merge_qkv", Merge)
                .call(filled(0), filled(1), filled(2), table(rotary.cosine), table(rotary.sine))};
  }
};

}  // namespace

RotaryTable rotary_table(const RotaryShape& shape, const at::TensorOptions& options) {
  require(shape.positions >= 0 && shape.head_dim >= 0 && shape.head_dim % 2 == 0,
          "rotary_table: {} positions of heads of size {}; allowed: an even size, whose halves turn together",
          shape.positions, shape.head_dim);
  const std::int64_t half = shape.head_dim / 2;
  Tensor cosine = at::empty({shape.positions, half}, at::kDouble), sine = at::empty_like(cosine);
  auto* c = cosine.data_ptr<double>();
  auto* s = sine.data_ptr<double>();
  for (std::int64_t i = 0; i < half; ++i) {
    const double frequency = std::pow(shape.theta, -2.0 * static_cast<double>(i) / static_cast<double>(shape.head_dim));
    for (std::int64_t position = 0; position < shape.positions; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      c[position * half + i] = std::cos(angle);
      s[position * half + i] = std::sin(angle);
    }
  }
  return {cosine.to(options), sine.to(options)};
}

void require_packed(const Tensor& qkv, const QkvLayout& layout) {
  const auto& [cosine, sine] = layout.rotary;
  const std::int64_t heads = layout.heads + 2 * layout.kv_heads;
  require(layout.heads > 0 && layout.kv_heads > 0 && layout.heads % layout.kv_heads == 0,
          "split_qkv: {} heads of queries, {} of keys; allowed: a number of keys' heads that divides that of queries",
          layout.heads, layout.kv_heads);
  require_sizes({"split_qkv", "qkv", qkv}, {any_size, any_size, any_size}, qkv);
  require(qkv.size(2) % heads == 0, "split_qkv: qkv is [{}, {}, {}]; allowed: [batch, sequence, {} heads of one size]",
          qkv.size(0), qkv.size(1), qkv.size(2), heads);
  if (!cosine.defined()) return;
  const std::int64_t size = qkv.size(2) / heads;
  require(size % 2 == 0, "split_qkv: heads of size {} are to turn; allowed: an even size, whose halves turn together", size);
  require_sizes({"split_qkv", "the table of cosines", cosine}, {any_size, size / 2}, qkv);
  require_alike({"split_qkv", "the table of sines", sine}, cosine);
  require_contiguous({"split_qkv", "the table of cosines", cosine});
  require_contiguous({"split_qkv", "the table of sines", sine});
  require(qkv.size(1) <= cosine.size(0), "the sequence has {} tokens; the model knows {} positions", qkv.size(1),
          cosine.size(0));
}

ThreeTensors split_qkv(const Tensor& qkv, const QkvLayout& layout) {
  require_packed(qkv, layout);
  auto node = make_node<SplitNode>(qkv);
  ThreeTensors out;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto cosine = table(layout.rotary.cosine), sine = table(layout.rotary.sine);
    out = layout.in_place
              ? BONFIRE_OPERATOR("bonfire::split_qkv_", SplitInPlace).call(qkv, cosine, sine, layout.heads, layout.kv_heads)
              : BONFIRE_OPERATOR("bonfire::split_qkv", Split).call(qkv, cosine, sine, layout.heads, layout.kv_heads);
  }
  if (!node) return out;
  auto& [q, k, v] = out;
  node->rotary = layout.rotary;
  node->wanted = sums_wanted(qkv);
  node->sizes = {q.sizes().vec(), k.sizes().vec(), v.sizes().vec()};
  node->options = q.options();
  for (Tensor* tensor : {&q, &k, &v}) torch::autograd::set_history(*tensor, node);
  return out;
}

Tensor turned_qkv(const Tensor& qkv, const QkvLayout& layout) {
  require_packed(qkv, layout);
  const Tensor packed = qkv.contiguous();
  const auto& [cosine, sine] = layout.rotary;
  if (!cosine.defined()) return packed;
  const Tensor own = layout.in_place || !packed.is_same(qkv) ? packed : packed.clone();
  BONFIRE_OPERATOR("bonfire::split_qkv_", SplitInPlace).call(own, cosine, sine, layout.heads, layout.kv_heads);
  return own;
}

TORCH_LIBRARY_IMPL(bonfire, CPU, m) {
  m.impl("split_qkv", split_cpu);
  m.impl("split_qkv_", split_in_place_cpu);
  m.impl("merge_qkv", merge_cpu);
}

TORCH_LIBRARY_IMPL(bonfire, CompositeExplicitAutograd, m) {
  m.impl("split_qkv", split_composite);
  m.impl("split_qkv_", split_in_place_composite);
  m.impl("merge_qkv", merge_composite);
  m.impl("turn_back_qkv_", turn_back_composite);
  m.impl("merge_qkv_sums", merge_sums_composite);
}

}  // namespace bonfire
