#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/weight_queue.h"

namespace bonfire {

using Tensors = std::vector<at::Tensor>;

// What one forward left behind in autograd: where gradients enter its graph, and the leaves that stand for what came in.
struct ForwardGraph {
  std::vector<torch::autograd::Edge> outputs;
  Tensors inputs;
};

// Gradients of parameters that are still to be made.
struct WeightGradients {
  std::shared_ptr<WeightQueue> put_off{};  // by our layers
  // Where the second half enters the graph, for other operations.
  std::vector<torch::autograd::Edge> entries;
  Tensors gradients;
};

// Both halves at once: adds to the gradients of the parameters, and returns those of the inputs. The graph is gone then.
BONFIRE_API Tensors whole_backward(const ForwardGraph& graph, const Tensors& gradients);

// The gradients of the inputs alone. Our layers put those of their weights into a queue. What another operation with
// parameters gets on the way is kept in `later`, with what its other half needs of the graph; this works for any module
// whose operations look at what is asked of them. The rest of the graph is let go. Where nothing that came in needs a
// gradient (tokens), backward goes as far as the first operation with parameters, so that the halves of a first stage are
// like those of others.
BONFIRE_API Tensors input_half(const ForwardGraph& graph, const Tensors& gradients, WeightGradients& later);
BONFIRE_API void weight_half(WeightGradients later);

// The name of an operation that makes both gradients in one piece, so that its halves cannot be had one by one; empty: none.
BONFIRE_API std::string unsplittable(const ForwardGraph& graph);

}  // namespace bonfire
