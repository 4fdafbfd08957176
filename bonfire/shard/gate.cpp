#include "bonfire/shard/gate.h"

#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace bonfire {
namespace {

class Gate final : public torch::autograd::Node {
 public:
  explicit Gate(std::function<void()> passed) : passed_(std::move(passed)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    passed_();
    return std::move(gradients);
  }
  std::string name() const override { return "BonfireUnitGate"; }

 private:
  std::function<void()> passed_;
};

}  // namespace

bool put_gate(std::vector<at::Tensor>& tensors, std::function<void()> passed) {
  std::vector<at::Tensor*> through;
  torch::autograd::edge_list edges;
  for (auto& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    through.push_back(&tensor);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  if (through.empty()) return false;
  std::shared_ptr<Gate> gate(new Gate(std::move(passed)), torch::autograd::deleteNode);
  gate->set_next_edges(std::move(edges));
  for (auto* tensor : through) {
    // Shares memory and version with what it stands for, so that a change in place is still noticed.
    at::Tensor beyond = tensor->detach();
    torch::autograd::set_history(beyond, gate);
    *tensor = std::move(beyond);
  }
  return true;
}

Replaced::Replaced(const at::Tensor& outside, const at::Tensor& inside)
    : outside_(outside.getIntrusivePtr()), inside_(inside), version_(outside._version()) {}

bool Replaced::written() const {
  const at::Tensor outside(outside_.lock());
  return outside.defined() && outside._version() != version_;
}

bool Replaced::can_follow() const {
  const at::Tensor outside(outside_.lock());
  return outside.defined() && !outside.is_leaf() && !outside.is_view();
}

void Replaced::follow(const at::Tensor& beyond) const {
  const at::Tensor outside(outside_.lock());
  torch::autograd::impl::set_gradient_edge(outside, torch::autograd::impl::gradient_edge(beyond));
}

}  // namespace bonfire
