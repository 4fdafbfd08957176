#include "bonfire/kernels/weight_queue.h"

#include <map>
#include <memory>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

namespace bonfire {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct HandingNode : Node {
  variable_list gradients;
  variable_list apply(variable_list&&) override { return std::move(gradients); }
};

}  // namespace

HandingOver hand_over(WeightQueue::Made made) {
  // Where the parameters are, so that their hooks run where they would in any backward.
  const auto& metadata = made.to.front().function->input_metadata(made.to.front().input_nr);
  HandingOver handing{.gradient = at::empty({0}, metadata.options())};
  std::shared_ptr<HandingNode> node(new HandingNode, torch::autograd::deleteNode);
  node->add_input_metadata(handing.gradient);
  node->set_next_edges(std::move(made.to));
  node->gradients = std::move(made.gradients);
  handing.root = Edge(std::move(node), 0);
  return handing;
}

WeightQueue::Made WeightQueue::run(const std::function<bool(const Node*)>& elsewhere) {
  const at::NoGradGuard no_grad;
  auto entries = std::exchange(put_off_, {});
  struct Parameter {
    int uses = 0;  // still to be made
    Made made{};
  };
  std::map<const Node*, Parameter> parameters;
  for (const auto& entry : entries) ++parameters[entry.to.function.get()].uses;
  Made ready, rest;
  const auto move_to = [](Made& to, Made from) {
    to.to.insert(to.to.end(), from.to.begin(), from.to.end());
    to.gradients.insert(to.gradients.end(), from.gradients.begin(), from.gradients.end());
  };
  for (std::size_t at = 0; at < entries.size(); ++at) {
    auto& [layer, to, make] = entries[at];
    auto& [uses, made] = parameters.at(to.function.get());
    made.to.push_back(to);
    made.gradients.push_back(make());
    // What it needed goes before the next one takes memory.
    make = nullptr;
    if (--uses == 0) move_to(elsewhere(to.function.get()) ? rest : ready, std::exchange(made, {}));
    if (ready.to.empty() || (at + 1 < entries.size() && entries[at + 1].layer == layer)) continue;
    const auto [root, gradient] = hand_over(std::exchange(ready, {}));
    torch::autograd::Engine::get_default_engine().execute({root}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  }
  return rest;
}

}  // namespace bonfire
