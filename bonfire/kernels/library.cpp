#include <torch/library.h>

// The operators of Bonfire, as torch's dispatcher knows them. The files beside this one hold their CPU implementations and,
// for devices without one, a composition of torch's own operators; the CUDA plug-in registers its kernels for the same
// names. None of them records autograd's graph: the functions in the headers do.
TORCH_LIBRARY(bonfire, m) {
  // Norms. Without a residual `sum` comes back empty and the norm is of x. Where backward is asked for the norm again (layer
  // norm: given the bias), `normed` comes back, otherwise it is empty; likewise `sums`, of dx over its rows.
  m.def("rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor normed, Tensor sum, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor d_normed, Tensor? d_sum, Tensor x, Tensor weight, Tensor rstd, bool again) -> (Tensor dx, "
      "Tensor d_weight, Tensor normed)");

  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor normed, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor d_normed, Tensor? d_stream, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? "
      "bias, bool sums) -> (Tensor dx, Tensor d_weight, Tensor d_bias, Tensor normed, Tensor sums)");

  // a b + bias + residual; and `out` = a b, plus what `out` holds where `accumulate`. `out` may be fp32 for narrower inputs.
  m.def("product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("product_into_(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()");

  // wide = x weight^T + bias and its activation, SwiGLU where `gated`, otherwise GELU; and the gradient of wide, given that
  // of what the activation was multiplied with: with the activation again and, of GELU, its sums over rows, both empty where
  // they do not come. No tensor at all where the device has no kernel for it that is quicker than its parts.
  m.def("activated_product(Tensor x, Tensor weight, Tensor? bias, bool gated) -> Tensor[]");
  m.def("activated_product_backward(Tensor dy, Tensor weight, Tensor wide, bool gated, bool again) -> Tensor[]");

  // Eight bits: e5m2 where `wide_range`, otherwise e4m3. A tensor is scaled by its largest magnitude where `measure`,
  // otherwise by the largest of `history`, whose place `position` gets its own; neither that place nor the one after it
  // counts.
  m.def(
      "fp8_quantize(Tensor x, Tensor(a!) history, Tensor? later, int position, bool measure, bool wide_range, bool values, "
      "bool "
      "transposed) "
      "-> (Tensor values, Tensor transposed, Tensor inverse)");
  m.def("fp8_quantize_rows(Tensor x, bool wide_range) -> (Tensor values, Tensor inverse)");
  // What the activation, and its gradient both ways, would be rounded to by fp8_quantize without measuring. Without a
  // history for it the activation does not come again.
  m.def(
      "fp8_swiglu(Tensor gate_up, Tensor(a!) history, Tensor? later, int position, bool transposed) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "fp8_swiglu_backward(Tensor d_out, Tensor gate_up, Tensor(a!)? history, Tensor? later, int position, Tensor(b!) "
      "gradient_history, Tensor? gradient_later, int gradient_position) -> (Tensor activated, Tensor activated_inverse, "
      "Tensor values, Tensor transposed, Tensor inverse)");
  // Parts of weights with scales: x has elements [first, first + length) of a weight each `each` of which share a scale. Its
  // magnitudes are noted where they are larger; and it is rounded to eight bits, scaled by the largest magnitudes.
  m.def("fp8_note_magnitudes_(Tensor(a!) magnitudes, Tensor x, int first, int each) -> ()");
  m.def("fp8_round_(Tensor(a!) out, Tensor x, Tensor magnitudes, int first, int each) -> ()");
  m.def("fp8_transposed(Tensor x) -> Tensor");
  // `out` = a b + bias + addend, which may be `out`. The inverses: one element, or one for each row of a and column of b.
  m.def(
      "fp8_product_(Tensor(a!) out, Tensor a, Tensor b, Tensor inverse_a, Tensor inverse_b, Tensor? bias, Tensor? addend, "
      "bool short_sums) -> ()");

  // [batch, sequence, (heads + 2 kv_heads) * head_dim] to three [batch, heads, sequence, head_dim], q and k rotated, and
  // back. How the three lie in memory is up to the device.
  m.def("split_qkv(Tensor qkv, Tensor? cosine, Tensor? sine, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)");
  // May turn them where they are: then the three are views of qkv.
  m.def("split_qkv_(Tensor(a!) qkv, Tensor? cosine, Tensor? sine, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)");
  m.def("merge_qkv(Tensor q, Tensor k, Tensor v, Tensor? cosine, Tensor? sine) -> Tensor");
  // What split_qkv_ turned where it lies, turned back there.
  m.def("turn_back_qkv_(Tensor(a!) qkv, Tensor cosine, Tensor sine, int heads, int kv_heads) -> ()");
  // Where nothing turns, and with the column sums of what comes back.
  m.def("merge_qkv_sums(Tensor q, Tensor k, Tensor v) -> (Tensor qkv, Tensor sums)");

  // Attention of q, k and v where they lie in the packed tensor: its result [batch, sequence, heads * head_dim]; the packed
  // tensor, q and k turned, which is `qkv` where that may be overwritten; and `log_sums` [batch, heads, sequence, 1]. The
  // last two go to backward, whose gradient is as packed as qkv, and of the turned ones. No tensor at all, and nothing
  // changed, where the device has no kernel for it.
  m.def(
      "packed_attention(Tensor(a!) qkv, Tensor? cosine, Tensor? sine, int heads, int kv_heads, bool causal, bool in_place) "
      "-> Tensor[]");
  m.def(
      "packed_attention_backward(Tensor d_out, Tensor qkv, Tensor out, Tensor log_sums, int heads, int kv_heads, bool "
      "causal) -> Tensor");
  // Sums of the packed gradient over its rows, where nothing was turned. Those of keys are zero, since softmax does not see
  // what is added to all keys alike, and those of values are d_out's, since the weights of a row sum to one.
  m.def("packed_attention_sums(Tensor d_qkv, Tensor d_out, int heads, int kv_heads) -> Tensor");

  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor d_out, Tensor gate_up) -> Tensor");
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_backward(Tensor d_out, Tensor x) -> Tensor");
  // The same, leaving the activation in place of its gradient. The gelu's also sums its result over all dimensions but the
  // last, and can do so without replacing anything.
  m.def("swiglu_backward_(Tensor(a!) d_out, Tensor gate_up) -> Tensor");
  m.def("gelu_backward_(Tensor(a!) d_out, Tensor x) -> (Tensor dx, Tensor sums)");
  m.def("gelu_backward_sums(Tensor d_out, Tensor x) -> (Tensor dx, Tensor sums)");

  // [rows, columns] to [columns], in fp32 at least and in a fixed order.
  m.def("column_sums(Tensor x) -> Tensor");

  // `out` = x times the one element of `factor`, rounded once; `out` may be x.
  m.def("scaled_into_(Tensor(a!) out, Tensor x, Tensor factor) -> ()");

  // Losses of each row; cross_entropy_ leaves their gradients in place of the logits.
  m.def("cross_entropy(Tensor logits, Tensor target, int ignore_index) -> Tensor");
  m.def("cross_entropy_(Tensor(a!) logits, Tensor target, int ignore_index) -> Tensor");

  m.def("dropout(Tensor x, float p, int key, int first) -> Tensor");
  m.def("embedding_add_(Tensor(a!) out, Tensor tokens, Tensor gradient) -> ()");

  // Steps of optimizers: `step` is the eight numbers that they use, or `numbers`, on the device, where that is given.
  m.def(
      "adam_(Tensor(a!) parameters, Tensor gradients, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? "
      "max_exp_avg_sq, Tensor(e!)? low_precision, Tensor? scale_tensor, Tensor? numbers, float[] step) -> ()");
  // Many at once; of the optional ones either none, or one for each, empty where it has none. Steps: one after the other.
  m.def(
      "adam_all_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
      "Tensor(d!)[] max_exp_avg_sq, Tensor(e!)[] low_precision, Tensor[] scale_tensors, Tensor[] numbers, float[] steps) "
      "-> ()");
  m.def(
      "sgd_(Tensor(a!) parameters, Tensor gradients, Tensor(b!)? momentum_buffer, Tensor(c!)? low_precision, Tensor? "
      "scale_tensor, Tensor? numbers, float[] step) -> ()");
  m.def("sum_of_squares(Tensor[] tensors) -> Tensor");
}
