#include "bonfire/kernels/backward_node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/gradient_sink.h"

namespace bonfire {

torch::autograd::variable_list BackwardNode::apply(torch::autograd::variable_list&& gradients) {
  require(!released_, "{}: backward ran twice through the same graph; keep the graph the first time (retain_graph)", name());
  require(!at::GradMode::is_enabled(), "{} has no second derivative; run backward without create_graph", name());
  bool any = false;
  for (const auto& gradient : gradients) any = any || gradient.defined();
  if (!any) return torch::autograd::variable_list(num_outputs());
  auto made = backward(gradients);
  // What was put off has all that it needs.
  if (queue_) release_variables();
  return made;
}

at::Tensor BackwardNode::take_saved(std::size_t index) {
  at::Tensor tensor = saved(index);
  if (queue_ || !torch::autograd::get_current_graph_task_keep_graph()) saved_[index].reset_data();
  return tensor;
}

void BackwardNode::release_variables() {
  for (auto& variable : saved_) variable.reset_data();
  queue_.reset();
  released_ = true;
}

void deliver(GradientSink& sink, const at::Tensor& gradient) {
  bool fresh = false;
  const at::Tensor buffer = sink.buffer(fresh);
  if (fresh)
    buffer.copy_(gradient.view(buffer.sizes()));
  else
    buffer.add_(gradient.view(buffer.sizes()));
  sink.arrived();
}

at::Tensor parameter_gradient(const std::shared_ptr<GradientSink>& sink, const at::Tensor& gradient, at::ScalarType type) {
  if (!sink) return gradient.to(type);
  deliver(*sink, gradient);
  return {};
}

}  // namespace bonfire
