#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Gradients of parameters that a backward has put off: products, mostly. It made the gradient of what came in, and left here
// what is to be done for the rest. One queue belongs to one backward.
class BONFIRE_API WeightQueue {
 public:
  struct Entry {
    const void* layer = nullptr;       // what is put off by one arrives together
    torch::autograd::Edge to{};        // where autograd takes the gradient on
    std::function<at::Tensor()> make;  // hands the gradient to the parameter's sink, or returns it where there is none
  };
  void push(Entry entry) { put_off_.push_back(std::move(entry)); }
  std::size_t size() const { return put_off_.size(); }

  // Gradients on their way to autograd; undefined ones are in their sinks.
  struct Made {
    std::vector<torch::autograd::Edge> to;
    std::vector<at::Tensor> gradients;
  };
  // Makes all, in the order in which they were put off, and empties the queue. Each parameter hears of its gradient as soon
  // as all of its uses here are made. Those that are to get something from elsewhere too come back, for hand_over().
  Made run(const std::function<bool(const torch::autograd::Node* parameter)>& elsewhere);

 private:
  std::vector<Entry> put_off_;
};

// A root of a backward that hands these on, undefined ones too: a parameter whose gradient is in its sink hears that it
// came.
struct HandingOver {
  torch::autograd::Edge root;
  at::Tensor gradient;
};
HandingOver hand_over(WeightQueue::Made made);

}  // namespace bonfire
