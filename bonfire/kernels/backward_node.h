#pragma once

#include <memory>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "bonfire/kernels/weight_queue.h"

namespace bonfire {

// A node of autograd's graph whose backward is written by hand. Lighter than torch::autograd::Function, and it may hold
// things that are not tensors.
class BackwardNode : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) final;
  void release_variables() override;

  void save(const at::Tensor& tensor) { saved_.emplace_back(tensor, false); }

  // Inputs that are parameters and whose gradients may be put off.
  virtual std::vector<std::size_t> parameters() const { return {}; }
  // The next backward puts them into the queue, whatever autograd asks for.
  void put_off(std::shared_ptr<WeightQueue> queue) { queue_ = std::move(queue); }

 protected:
  // Where this backward is to put them; null: they are made at once.
  const std::shared_ptr<WeightQueue>& queue() const { return queue_; }
  // Of one of parameters(): whether its gradient is to be made, now or later.
  bool wants(std::size_t parameter) {
    return queue_ ? next_edge(parameter).is_valid() : task_should_compute_output(parameter);
  }
  // Makes it now, or puts that off. `make` may not refer to this node.
  template <class Make>
  void give(torch::autograd::variable_list& out, std::size_t parameter, Make make) {
    if (queue_)
      queue_->push({this, next_edge(parameter), std::move(make)});
    else
      out[parameter] = make();
  }
  // A saved tensor for `make`: where that is put off, without the graph that it came from.
  at::Tensor for_later(const at::Tensor& tensor) const { return queue_ ? tensor.tensor_data() : tensor; }

  // One gradient per input, undefined where none is wanted. `gradients` has one entry per output, undefined where nothing
  // arrived.
  virtual torch::autograd::variable_list backward(const torch::autograd::variable_list& gradients) = 0;
  at::Tensor saved(std::size_t index) { return saved_[index].unpack(); }
  // The same, for the last time: its memory goes with the tensor that is returned, unless there may be another backward.
  at::Tensor take_saved(std::size_t index);

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  std::shared_ptr<WeightQueue> queue_;
  bool released_ = false;
};

// A node behind the given inputs, or nothing where none of them needs a gradient.
template <class Node, class... Inputs>
std::shared_ptr<Node> make_node(const Inputs&... inputs) {
  if (!torch::autograd::compute_requires_grad(inputs...)) return nullptr;
  std::shared_ptr<Node> node(new Node(), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

// The same whose next edges are those of the inputs that are defined.
template <class Node>
std::shared_ptr<Node> node_behind(const std::vector<at::Tensor>& inputs) {
  torch::autograd::edge_list edges;
  bool any = false;
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    any = any || input.requires_grad();
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  }
  if (!any || !at::GradMode::is_enabled()) return nullptr;
  std::shared_ptr<Node> node(new Node(), torch::autograd::deleteNode);
  node->set_next_edges(std::move(edges));
  return node;
}

}  // namespace bonfire
