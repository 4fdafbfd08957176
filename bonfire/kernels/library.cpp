#include <torch/library.h>

// The operators of Bonfire, as torch's dispatcher knows them. The files beside this one hold their CPU implementations and,
// for devices without one, a composition of torch's own operators; the CUDA plug-in registers its kernels for the same
// names. None of them records autograd's graph: the functions in the headers do.
TORCH_LIBRARY(bonfire, m) {
  // Norms. Without a residual `sum` comes back empty and the norm is of x.
  m.def("rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor normed, Tensor sum, Tensor rstd)");
  m.def("rms_norm_backward(Tensor d_normed, Tensor? d_sum, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)");

  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor normed, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor d_normed, Tensor? d_stream, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> "
      "(Tensor, "
      "Tensor, Tensor)");

  // a b + bias + residual; and `out` = a b, plus what `out` holds where `accumulate`. `out` may be fp32 for narrower inputs.
  m.def("product(Tensor a, Tensor b, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("product_into_(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()");

  // [batch, sequence, (heads + 2 kv_heads) * head_dim] to three [batch, heads, sequence, head_dim], q and k rotated, and
  // back. How the three lie in memory is up to the device.
  m.def("split_qkv(Tensor qkv, Tensor? cosine, Tensor? sine, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)");
  m.def("merge_qkv(Tensor q, Tensor k, Tensor v, Tensor? cosine, Tensor? sine) -> Tensor");

  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor d_out, Tensor gate_up) -> Tensor");
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_backward(Tensor d_out, Tensor x) -> Tensor");

  // Losses of each row; cross_entropy_ leaves their gradients in place of the logits.
  m.def("cross_entropy(Tensor logits, Tensor target, int ignore_index) -> Tensor");
  m.def("cross_entropy_(Tensor(a!) logits, Tensor target, int ignore_index) -> Tensor");

  m.def("dropout(Tensor x, float p, int key, int first) -> Tensor");
  m.def("embedding_add_(Tensor(a!) out, Tensor tokens, Tensor gradient) -> ()");

  m.def(
      "adam_(Tensor(a!) parameters, Tensor gradients, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? "
      "max_exp_avg_sq, "
      "Tensor(e!)? low_precision, Tensor? scale_tensor, float lr, float beta1, float beta2, float eps, float weight_decay, "
      "int step, float scale, bool decoupled) -> ()");
  m.def(
      "sgd_(Tensor(a!) parameters, Tensor gradients, Tensor(b!)? momentum_buffer, Tensor(c!)? low_precision, Tensor? "
      "scale_tensor, float lr, float momentum, float dampening, float weight_decay, int step, float scale, bool nesterov) "
      "-> "
      "()");
  m.def("sum_of_squares(Tensor tensor) -> Tensor");
}
