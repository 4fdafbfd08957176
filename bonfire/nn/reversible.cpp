#include "bonfire/nn/reversible.h"

#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sub.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/backward_node.h"

namespace bonfire {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

class ReversibleChain::Output {
 public:
  explicit Output(Tensor made) : kept_(std::move(made)) {}

  // Whoever takes over hands it back, before backward comes to the block.
  void take_over() { kept_.reset(); }
  void hand_back(const Tensor& made) { again_ = made; }

  struct Found {
    Tensor streams;
    bool own = false;  // nobody else has it
  };
  Found find() {
    if (again_.defined()) return {std::exchange(again_, Tensor()), true};
    require(kept_.defined(),
            "a reversible block's result is not there: the block after it has taken over to make it again, but backward did "
            "not go through that one; give the loss of the whole chain to backward, or run the blocks without a chain");
    return {kept_, false};
  }

 private:
  Tensor kept_, again_;
};

std::shared_ptr<ReversibleChain::Output> ReversibleChain::output_in(const Tensor& streams) const {
  const auto memory = memory_ ? memory_->lock() : nullptr;
  const bool same = memory && memory.get() == streams.storage().unsafeGetStorageImpl() && streams.storage_offset() == 0;
  return same ? output_.lock() : nullptr;
}

void ReversibleChain::made(const Tensor& streams, const std::shared_ptr<Output>& output) {
  memory_ = streams.storage().getWeakStorageImpl();
  output_ = output;
}

namespace {

// Puts the state of a forward back for as long as it is repeated.
class RepeatedRandom {
 public:
  RepeatedRandom(const std::shared_ptr<DropoutState>& state, const std::optional<DropoutState>& then) : state_(state) {
    if (state_) now_ = std::exchange(*state_, *then);
  }
  ~RepeatedRandom() {
    if (state_) *state_ = now_;
  }
  RepeatedRandom(const RepeatedRandom&) = delete;
  RepeatedRandom& operator=(const RepeatedRandom&) = delete;

 private:
  const std::shared_ptr<DropoutState>& state_;
  DropoutState now_;
};

// What autograd keeps may lie beside what is written here, in one tensor: it would take that for a change of its own.
void subtract(Tensor to, const Tensor& from, const Tensor& what) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::sub_out(to, from, what);
}
void add(Tensor to, const Tensor& one, const Tensor& other) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::add_out(to, one, other);
}

// One of the two functions, with the graph of its gradient.
struct Repeated {
  Repeated(const std::function<Tensor(const Tensor&)>& function, const Tensor& x) : input(x.detach()) {
    const at::AutoGradMode with_graph(true);
    input.set_requires_grad(true);
    output = function(input);
  }

  Tensor input, output;
};

// Tells our layers in a graph to leave the gradients of their parameters in the queue.
void put_off_all(const Tensor& output, const std::shared_ptr<WeightQueue>& queue) {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto enter = [&](torch::autograd::Node* node) {
    if (node && seen.insert(node).second) open.push_back(node);
  };
  enter(output.grad_fn().get());
  while (!open.empty()) {
    auto* const node = open.back();
    open.pop_back();
    if (auto* layer = dynamic_cast<BackwardNode*>(node)) layer->put_off(queue);
    for (const auto& edge : node->next_edges()) enter(edge.function.get());
  }
}

// Inputs: the streams, and the parameters.
struct ReversibleNode final : BackwardNode {
  ReversibleBlock block;
  std::optional<DropoutState> random;
  std::shared_ptr<ReversibleChain::Output> own, before;  // before: null where somebody else keeps what came in

  std::vector<std::size_t> parameters() const override {
    std::vector<std::size_t> all;
    for (std::size_t at = 1; at < next_edges().size(); ++at) all.push_back(at);
    return all;
  }

  variable_list backward(const variable_list& gradients) override {
    variable_list out(num_outputs());
    const RepeatedRandom repeated(block.random, random);
    auto [y, is_own] = own->find();
    const Tensor& dy = gradients[0];
    const Tensor dx = at::empty_like(dy), x = is_own ? y : at::empty_like(y);
    {
      auto second = std::make_optional<Repeated>(block.second, y[0]);
      subtract(x[1], y[1], second->output.detach());
      add(dx[0], dy[0], gradient_through(out, second, dy[1]));
    }
    {
      auto first = std::make_optional<Repeated>(block.first, x[1]);
      if (before) subtract(x[0], y[0], first->output.detach());
      y.reset();
      add(dx[1], dy[1], gradient_through(out, first, dx[0]));
    }
    if (before) before->hand_back(x);
    if (task_should_compute_output(0)) out[0] = dx;
    return out;
  }

  void release_variables() override {
    BackwardNode::release_variables();
    own.reset();
  }

 private:
  // Adds the gradients of the parameters to `out`, or puts them off. The graph is gone afterwards.
  Tensor gradient_through(variable_list& out, std::optional<Repeated>& part, const Tensor& d_output) {
    edge_list ends{torch::autograd::impl::gradient_edge(part->input)};
    std::vector<std::size_t> wanted;
    for (std::size_t at = 0; at < block.parameters.size(); ++at)
      if (wants(1 + at)) {
        wanted.push_back(1 + at);
        ends.push_back(next_edge(1 + at));
      }
    if (queue()) put_off_all(part->output, queue());
    const edge_list roots{torch::autograd::impl::gradient_edge(part->output)};
    part->output.reset();
    part->input.reset();
    auto made =
        torch::autograd::Engine::get_default_engine().execute(roots, {d_output}, /*keep_graph=*/false,
                                                              /*create_graph=*/false, /*accumulate_grad=*/false, ends);
    part.reset();
    for (std::size_t at = 0; at < wanted.size(); ++at)
      if (auto& gradient = made[1 + at]; gradient.defined()) give(out, wanted[at], [gradient] { return gradient; });
    return made[0];
  }
};

}  // namespace

Tensor reversible(const Tensor& streams, const ReversibleBlock& block) {
  require(streams.dim() > 1 && streams.size(0) == 2,
          "reversible: the streams have {} dimensions, the first of size {}; allowed: two streams", streams.dim(),
          streams.dim() ? streams.size(0) : 0);
  std::vector<Tensor> inputs{streams};
  inputs.insert(inputs.end(), block.parameters.begin(), block.parameters.end());
  auto node = node_behind<ReversibleNode>(inputs);
  Tensor out;
  {
    const at::NoGradGuard no_graph;
    const Tensor x = streams.detach();
    out = at::empty_like(x);
    add(out[0], x[0], block.first(x[1]));
    add(out[1], x[1], block.second(out[0]));
  }
  if (!node) return out;
  node->block = block;
  if (block.random) node->random = *block.random;
  node->own = std::make_shared<ReversibleChain::Output>(out.tensor_data());
  if (block.chain) {
    node->before = block.chain->output_in(streams);
    if (node->before) node->before->take_over();
    block.chain->made(out, node->own);
  }
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace bonfire
