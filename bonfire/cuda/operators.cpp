// CUDA's side of the operators that the files of bonfire/kernels declare.
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/cuda/activation.h"
#include "bonfire/cuda/columns.h"
#include "bonfire/cuda/cross_entropy.h"
#include "bonfire/cuda/embedding.h"
#include "bonfire/cuda/norm.h"
#include "bonfire/cuda/qkv.h"
#include "bonfire/cuda/tensor_memory.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Makes `like`'s device current and launches on its stream.
template <class Launcher, class... Arguments>
void launch(const Tensor& like, Launcher launcher, const Arguments&... arguments) {
  const c10::cuda::CUDAGuard guard(like.device());
  launcher(arguments..., c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

const void* data_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

Tensor dense(const OptionalTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

// Norms.

// Weights of a type that the kernels do not take with x, as x's.
Tensor weight_for(const Tensor& x, const Tensor& weight) {
  const bool taken = weight.scalar_type() == x.scalar_type() || weight.scalar_type() == wide_type(x);
  return (taken ? weight : weight.to(wide_type(x))).contiguous();
}

NormShape norm_shape(const Tensor& x, const Tensor& weight, bool centered) {
  const std::int64_t columns = x.size(-1);
  return {.rows = columns ? x.numel() / columns : 0,
          .columns = columns,
          .type = element_of(x),
          .weight_type = element_of(weight),
          .centered = centered};
}

ThreeTensors rms_norm_cuda(const Tensor& given, const OptionalTensor& residual, const Tensor& given_weight, double eps) {
  const Tensor x = given.contiguous(), other = dense(residual), weight = weight_for(x, given_weight);
  const NormShape shape = norm_shape(x, weight, false);
  Tensor normed = at::empty_like(x), sum = residual ? at::empty_like(x) : at::empty({0}, x.options());
  Tensor rstd = at::empty({shape.rows}, x.options().dtype(wide_type(x)));
  launch(x, launch_norm, shape,
         NormForward{.x = x.const_data_ptr(),
                     .residual = data_of(other),
                     .weight = weight.const_data_ptr(),
                     .sum = sum.data_ptr(),
                     .normed = normed.data_ptr(),
                     .rstd = rstd.data_ptr(),
                     .eps = eps});
  return {normed, sum, rstd};
}

ThreeTensors layer_norm_cuda(const Tensor& given, const Tensor& given_weight, const Tensor& given_bias, double eps) {
  const Tensor x = given.contiguous(), weight = weight_for(x, given_weight);
  const Tensor bias = given_bias.to(weight.scalar_type()).contiguous();
  const NormShape shape = norm_shape(x, weight, true);
  Tensor normed = at::empty_like(x), mean = at::empty({shape.rows}, x.options().dtype(wide_type(x)));
  Tensor rstd = at::empty_like(mean);
  launch(x, launch_norm, shape,
         NormForward{.x = x.const_data_ptr(),
                     .weight = weight.const_data_ptr(),
                     .bias = bias.const_data_ptr(),
                     .normed = normed.data_ptr(),
                     .mean = mean.data_ptr(),
                     .rstd = rstd.data_ptr(),
                     .eps = eps});
  return {normed, mean, rstd};
}

struct NormGradients {
  Tensor dx, d_weight, d_bias, normed, sums;
};

// Whether backward makes the norm again; that of a layer norm needs its bias. And whether it sums dx, of a layer norm.
struct Again {
  bool wanted = false;
  Tensor bias{};
  bool sums = false;
};

// With a mean it is the layer norm's.
NormGradients norm_backward(const Tensor& d_normed, const OptionalTensor& d_stream, const Tensor& given,
                            const Tensor& given_weight, const Tensor& mean, const Tensor& rstd, const Again& again) {
  const Tensor x = given.contiguous(), dy = d_normed.contiguous(), ds = dense(d_stream);
  const Tensor weight = weight_for(x, given_weight);
  const bool centered = mean.defined();
  const NormShape shape = norm_shape(x, weight, centered);
  NormGradients out{.dx = at::empty_like(x),
                    .d_weight = at::empty({shape.columns}, rstd.options()),
                    .d_bias = {},
                    .normed = again.wanted ? at::empty_like(x) : at::empty({0}, x.options()),
                    .sums = {}};
  if (centered) {
    out.d_bias = at::empty_like(out.d_weight);
    out.sums = again.sums ? at::empty_like(out.d_weight) : at::empty({0}, rstd.options());
  }
  const Tensor bias = again.bias.defined() ? again.bias.to(weight.scalar_type()).contiguous() : Tensor();
  const Tensor parts = at::empty({(again.sums ? 3 : centered ? 2 : 1) * norm_parts(shape), shape.columns}, rstd.options());
  launch(x, launch_norm_backward, shape,
         NormBackward{.d_normed = dy.const_data_ptr(),
                      .d_stream = data_of(ds),
                      .x = x.const_data_ptr(),
                      .weight = weight.const_data_ptr(),
                      .mean = data_of(mean),
                      .rstd = rstd.const_data_ptr(),
                      .bias = data_of(bias),
                      .dx = out.dx.data_ptr(),
                      .normed = again.wanted ? out.normed.data_ptr() : nullptr,
                      .d_weight = out.d_weight.data_ptr(),
                      .d_bias = centered ? out.d_bias.data_ptr() : nullptr,
                      .dx_sums = again.sums ? out.sums.data_ptr() : nullptr,
                      .parts = parts.data_ptr()});
  return out;
}

ThreeTensors rms_norm_backward_cuda(const Tensor& d_normed, const OptionalTensor& d_sum, const Tensor& x,
                                    const Tensor& weight, const Tensor& rstd, bool again) {
  const auto out = norm_backward(d_normed, d_sum, x, weight, Tensor(), rstd, {.wanted = again});
  return {out.dx, out.d_weight, out.normed};
}

FiveTensors layer_norm_backward_cuda(const Tensor& d_normed, const OptionalTensor& d_stream, const Tensor& x,
                                     const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                                     const OptionalTensor& bias, bool sums) {
  const auto out = norm_backward(d_normed, d_stream, x, weight, mean, rstd,
                                 {.wanted = bias.has_value(), .bias = bias.value_or(Tensor()), .sums = sums});
  return {out.dx, out.d_weight, out.d_bias, out.normed, out.sums};
}

// Queries, keys and values. In memory each lies as [batch, sequence, heads, head_dim], as attention likes to read it and as
// its result is read.

HeadsMemory heads_of(const Tensor& x) {
  return {const_cast<void*>(x.const_data_ptr()), x.size(1), x.stride(0), x.stride(1), x.stride(2)};
}

QkvMemory qkv_memory(const Tensor& packed, const ThreeTensors& parts, const Tensor& cosine, const Tensor& sine) {
  const auto& [q, k, v] = parts;
  return {.packed = const_cast<void*>(packed.const_data_ptr()),
          .parts = {heads_of(q), heads_of(k), heads_of(v)},
          .cosine = data_of(cosine),
          .sine = data_of(sine),
          .batch = q.size(0),
          .sequence = q.size(2),
          .head_dim = q.size(3),
          .type = element_of(packed)};
}

// Cosines or sines, in the type that x's kernel computes in.
Tensor angles(const OptionalTensor& table, const Tensor& x) {
  return table ? table->to(wide_type(x)).contiguous() : Tensor();
}

// The three where they lie in the packed tensor.
ThreeTensors views_of(const Tensor& qkv, std::int64_t heads, std::int64_t kv_heads) {
  const Tensor all = qkv.view({qkv.size(0), qkv.size(1), heads + 2 * kv_heads, -1}).transpose(1, 2);
  return {all.narrow(1, 0, heads), all.narrow(1, heads, kv_heads), all.narrow(1, heads + kv_heads, kv_heads)};
}

ThreeTensors split_qkv_in_place_cuda(Tensor given, const OptionalTensor& cosine, const OptionalTensor& sine,
                                     std::int64_t heads, std::int64_t kv_heads) {
  const Tensor qkv = given.contiguous();
  ThreeTensors parts = views_of(qkv, heads, kv_heads);
  if (cosine) launch(qkv, launch_split_qkv, qkv_memory(qkv, parts, angles(cosine, qkv), angles(sine, qkv)));
  return parts;
}

ThreeTensors split_qkv_cuda(const Tensor& given, const OptionalTensor& cosine, const OptionalTensor& sine,
                            std::int64_t heads, std::int64_t kv_heads) {
  const Tensor qkv = given.contiguous();
  const std::int64_t batch = qkv.size(0), sequence = qkv.size(1), size = qkv.size(2) / (heads + 2 * kv_heads);
  if (!cosine) return views_of(qkv, heads, kv_heads);  // nothing turns
  const auto make = [&](std::int64_t count) {
    return at::empty({batch, sequence, count, size}, qkv.options()).transpose(1, 2);
  };
  ThreeTensors parts{make(heads), make(kv_heads), make(kv_heads)};
  launch(qkv, launch_split_qkv, qkv_memory(qkv, parts, angles(cosine, qkv), angles(sine, qkv)));
  return parts;
}

Tensor whole_rows(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

Tensor merge_qkv_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cosine,
                      const OptionalTensor& sine) {
  Tensor qkv = at::empty({q.size(0), q.size(2), (q.size(1) + 2 * k.size(1)) * q.size(3)}, q.options());
  launch(qkv, launch_merge_qkv,
         qkv_memory(qkv, {whole_rows(q), whole_rows(k), whole_rows(v)}, angles(cosine, qkv), angles(sine, qkv)));
  return qkv;
}

void turn_back_qkv_cuda(Tensor qkv, const Tensor& cosine, const Tensor& sine, std::int64_t heads, std::int64_t kv_heads) {
  require(qkv.is_contiguous(), "turn_back_qkv_: the packed tensor has gaps; allowed: contiguous memory");
  launch(qkv, launch_merge_qkv, qkv_memory(qkv, views_of(qkv, heads, kv_heads), angles(cosine, qkv), angles(sine, qkv)));
}

// Activations.

Tensor swiglu_cuda(const Tensor& given) {
  const Tensor gate_up = given.contiguous();
  auto sizes = gate_up.sizes().vec();
  const std::int64_t columns = sizes.back() /= 2;
  Tensor out = at::empty(sizes, gate_up.options());
  launch(out, launch_swiglu,
         SwigluMemory{.gate_up = gate_up.const_data_ptr(),
                      .result = out.data_ptr(),
                      .rows = columns ? out.numel() / columns : 0,
                      .columns = columns,
                      .type = element_of(out)});
  return out;
}

Tensor swiglu_gradient(const Tensor& d_out, const Tensor& given_gate_up, bool again) {
  const Tensor gate_up = given_gate_up.contiguous();
  const std::int64_t columns = d_out.size(-1);
  Tensor d_gate_up = at::empty_like(gate_up);
  launch(d_out, launch_swiglu_backward,
         SwigluMemory{.gate_up = gate_up.const_data_ptr(),
                      .d_out = d_out.const_data_ptr(),
                      .result = d_gate_up.data_ptr(),
                      .again = again,
                      .rows = columns ? d_out.numel() / columns : 0,
                      .columns = columns,
                      .type = element_of(gate_up)});
  return d_gate_up;
}

Tensor swiglu_backward_cuda(const Tensor& d_out, const Tensor& gate_up) {
  return swiglu_gradient(d_out.contiguous(), gate_up, false);
}

void require_contiguous(const Tensor& d_out) {
  require(d_out.is_contiguous(), "what an activation is to replace has gaps; allowed: contiguous memory");
}

Tensor swiglu_exchange_cuda(Tensor d_out, const Tensor& gate_up) {
  require_contiguous(d_out);
  return swiglu_gradient(d_out, gate_up, true);
}

Tensor gelu_cuda(const Tensor& given) {
  const Tensor x = given.contiguous();
  Tensor out = at::empty_like(x);
  launch(x, launch_gelu,
         GeluMemory{.x = x.const_data_ptr(), .result = out.data_ptr(), .elements = x.numel(), .type = element_of(x)});
  return out;
}

Tensor gelu_backward_cuda(const Tensor& given, const Tensor& given_x) {
  const Tensor d_out = given.contiguous(), x = given_x.contiguous();
  Tensor dx = at::empty_like(x);
  launch(x, launch_gelu_backward,
         GeluMemory{.x = x.const_data_ptr(),
                    .d_out = d_out.const_data_ptr(),
                    .result = dx.data_ptr(),
                    .elements = x.numel(),
                    .type = element_of(x)});
  return dx;
}

ColumnsMemory columns_memory(const Tensor& x, const Tensor& sums, const Tensor& parts) {
  return {.x = x.const_data_ptr(),
          .sums = sums.data_ptr(),
          .parts = parts.data_ptr(),
          .rows = x.size(-1) ? x.numel() / x.size(-1) : 0,
          .columns = x.size(-1),
          .stride = x.size(-1),
          .type = element_of(x)};
}

struct ColumnSums {
  Tensor sums, parts;
};
ColumnSums room_for_sums(const Tensor& x) {
  const std::int64_t columns = x.size(-1), rows = columns ? x.numel() / columns : 0;
  const auto options = x.options().dtype(wide_type(x));
  return {at::empty({columns}, options), at::empty({most_column_parts(rows, columns), columns}, options)};
}

Tensor column_sums_cuda(const Tensor& given) {
  const Tensor x = given.contiguous();
  const auto [sums, parts] = room_for_sums(x);
  launch(x, launch_column_sums, columns_memory(x, sums, parts));
  return sums;
}

TwoTensors merge_qkv_sums_cuda(const Tensor& q, const Tensor& k, const Tensor& v) {
  const ThreeTensors parts{whole_rows(q), whole_rows(k), whole_rows(v)};
  Tensor qkv = at::empty({q.size(0), q.size(2), (q.size(1) + 2 * k.size(1)) * q.size(3)}, q.options());
  const auto [sums, scratch] = room_for_sums(qkv);
  ColumnsMemory memory = columns_memory(qkv, sums, scratch);
  memory.result = qkv.data_ptr();
  launch(qkv, launch_merge_qkv_sums, qkv_memory(qkv, parts, {}, {}), memory);
  return {qkv, sums};
}

// Of the first columns of x, as many as there are sums.
void sum_columns_into(const Tensor& sums, const Tensor& x) {
  const Tensor first = x.narrow(-1, 0, sums.numel());
  const auto room = room_for_sums(first);
  ColumnsMemory memory = columns_memory(first, sums, room.parts);
  memory.stride = x.size(-1);
  launch(x, launch_column_sums, memory);
}

Tensor packed_attention_sums_cuda(const Tensor& d_qkv, const Tensor& given, std::int64_t heads, std::int64_t kv_heads) {
  require(d_qkv.is_contiguous(), "packed_attention_sums: the gradient has gaps; allowed: contiguous memory");
  const Tensor d_out = given.contiguous();
  const std::int64_t size = d_qkv.size(2) / (heads + 2 * kv_heads), query = heads * size, key = kv_heads * size;
  Tensor sums = at::zeros({d_qkv.size(2)}, d_qkv.options().dtype(wide_type(d_qkv)));
  sum_columns_into(sums.narrow(0, 0, query), d_qkv);
  const Tensor of_values = sums.narrow(0, query + key, key);
  if (heads == kv_heads)
    sum_columns_into(of_values, d_out);
  else
    of_values.copy_(column_sums_cuda(d_out).view({kv_heads, -1, size}).sum(1).flatten());
  return sums;
}

TwoTensors gelu_gradient_and_sums(const Tensor& d_out, const Tensor& given_x, bool again) {
  const Tensor x = given_x.contiguous();
  Tensor dx = at::empty_like(x);
  const auto [sums, parts] = room_for_sums(x);
  ColumnsMemory memory = columns_memory(x, sums, parts);
  memory.d_out = const_cast<void*>(d_out.const_data_ptr());
  memory.again = again;
  memory.result = dx.data_ptr();
  launch(x, launch_gelu_backward_sums, memory);
  return {dx, sums};
}

TwoTensors gelu_exchange_cuda(Tensor d_out, const Tensor& x) {
  require_contiguous(d_out);
  return gelu_gradient_and_sums(d_out, x, true);
}

TwoTensors gelu_sums_cuda(const Tensor& d_out, const Tensor& x) {
  return gelu_gradient_and_sums(d_out.contiguous(), x, false);
}

void scaled_into_cuda(Tensor out, const Tensor& given, const Tensor& given_factor) {
  const Tensor x = given.contiguous(), factor = given_factor.to(wide_type(x));
  require(out.is_contiguous() && out.scalar_type() == x.scalar_type() && out.numel() == x.numel() && factor.numel() == 1,
          "scaled_into_: {} elements of {} times {} to {} of {}", x.numel(), c10::toString(x.scalar_type()), factor.numel(),
          out.numel(), c10::toString(out.scalar_type()));
  launch(out, launch_scaled,
         ScaledMemory{.x = x.const_data_ptr(),
                      .out = out.data_ptr(),
                      .factor = factor.const_data_ptr(),
                      .elements = x.numel(),
                      .type = element_of(x)});
}

Tensor dropout_cuda(const Tensor& given, double p, std::int64_t key, std::int64_t first) {
  const Tensor x = given.contiguous();
  Tensor out = at::empty_like(x);
  launch(x, launch_dropout,
         DropoutMemory{.x = x.const_data_ptr(),
                       .out = out.data_ptr(),
                       .elements = x.numel(),
                       .type = element_of(x),
                       .p = p,
                       .key = static_cast<std::uint64_t>(key),
                       .first = static_cast<std::uint64_t>(first)});
  return out;
}

// Loss and embedding.

Tensor cross_entropy_rows(const Tensor& logits, const Tensor& target, std::int64_t ignore, bool gradient) {
  Tensor losses = at::empty({logits.size(0)}, logits.options().dtype(at::kDouble));
  launch(logits, launch_cross_entropy,
         CrossEntropyMemory{.logits = const_cast<void*>(logits.const_data_ptr()),
                            .target = target.const_data_ptr<std::int64_t>(),
                            .losses = losses.data_ptr<double>(),
                            .rows = logits.size(0),
                            .classes = logits.size(1),
                            .ignore = ignore,
                            .type = element_of(logits),
                            .gradient = gradient});
  return losses;
}

Tensor cross_entropy_cuda(const Tensor& logits, const Tensor& target, std::int64_t ignore) {
  return cross_entropy_rows(logits.contiguous(), target, ignore, false);
}
Tensor cross_entropy_in_place_cuda(Tensor logits, const Tensor& target, std::int64_t ignore) {
  require(logits.is_contiguous(), "cross_entropy_: the logits have gaps; allowed: contiguous ones");
  return cross_entropy_rows(logits, target, ignore, true);
}

void embedding_add_cuda(Tensor out, const Tensor& tokens, const Tensor& given) {
  Tensor gradient = given.contiguous();
  const bool known =
      out.scalar_type() == gradient.scalar_type() || (out.scalar_type() == at::kFloat && gradient.element_size() == 2);
  require(known && out.is_contiguous(), "embedding_add_: {} rows cannot be added to {}",
          c10::toString(gradient.scalar_type()), c10::toString(out.scalar_type()));
  const auto [sorted, order] = at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const Tensor parts = at::empty({embedding_parts(tokens.numel()), out.size(1)}, out.options().dtype(wide_type(out)));
  launch(out, launch_embedding_add,
         EmbeddingMemory{.out = out.data_ptr(),
                         .gradient = gradient.const_data_ptr(),
                         .tokens = sorted.const_data_ptr<std::int64_t>(),
                         .order = order.const_data_ptr<std::int64_t>(),
                         .parts = parts.data_ptr(),
                         .rows = tokens.numel(),
                         .columns = out.size(1),
                         .type = element_of(gradient),
                         .out_type = element_of(out)});
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("rms_norm", rms_norm_cuda);
  m.impl("rms_norm_backward", rms_norm_backward_cuda);
  m.impl("layer_norm", layer_norm_cuda);
  m.impl("layer_norm_backward", layer_norm_backward_cuda);
  m.impl("split_qkv", split_qkv_cuda);
  m.impl("split_qkv_", split_qkv_in_place_cuda);
  m.impl("merge_qkv", merge_qkv_cuda);
  m.impl("turn_back_qkv_", turn_back_qkv_cuda);
  m.impl("merge_qkv_sums", merge_qkv_sums_cuda);
  m.impl("packed_attention_sums", packed_attention_sums_cuda);
  m.impl("swiglu", swiglu_cuda);
  m.impl("swiglu_backward", swiglu_backward_cuda);
  m.impl("gelu", gelu_cuda);
  m.impl("gelu_backward", gelu_backward_cuda);
  m.impl("swiglu_backward_", swiglu_exchange_cuda);
  m.impl("gelu_backward_", gelu_exchange_cuda);
  m.impl("gelu_backward_sums", gelu_sums_cuda);
  m.impl("column_sums", column_sums_cuda);
  m.impl("dropout", dropout_cuda);
  m.impl("scaled_into_", scaled_into_cuda);
  m.impl("cross_entropy", cross_entropy_cuda);
  m.impl("cross_entropy_", cross_entropy_in_place_cuda);
  m.impl("embedding_add_", embedding_add_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
