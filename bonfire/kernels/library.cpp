#include <torch/library.h>

// The operators of Bonfire, as torch's dispatcher knows them. The files beside this one hold their CPU implementations and,
// for devices without one, a composition of torch's own operators; the CUDA plug-in registers its kernels for the same
// names.
TORCH_LIBRARY(bonfire, m) {
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
