#include "bonfire/pipeline/halves.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/util/Type.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/kernels/backward_node.h"

namespace bonfire {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

variable_list execute(const edge_list& roots, const Tensors& gradients, bool keep_graph, const edge_list* outputs) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false,
                                                               /*accumulate_grad=*/outputs == nullptr,
                                                               outputs ? *outputs : edge_list{});
}

// Keeps what comes to an operation.
class Capture final : public torch::autograd::FunctionPreHook {
 public:
  explicit Capture(std::shared_ptr<variable_list> seen) : seen_(std::move(seen)) {}
  variable_list operator()(const variable_list& gradients) override { return *seen_ = gradients; }

 private:
  std::shared_ptr<variable_list> seen_;
};

// The operations of a graph, and which of them lie on a way to where the first half of a backward ends.
class Walk {
 public:
  explicit Walk(const ForwardGraph& graph) {
    for (const auto& input : graph.inputs) ends_.push_back(torch::autograd::impl::gradient_edge(input));
    if (ends_.empty())
      if (Node* const first = first_with_parameters(graph.outputs))
        for (std::uint32_t at = 0; at < first->num_inputs(); ++at) ends_.emplace_back(first->getptr(), at);
    for (const auto& end : ends_) stops_.insert(end.function.get());
    for (const auto& output : graph.outputs)
      if (output.is_valid()) visit(output.function.get());
  }

  const edge_list& ends() const { return ends_; }
  bool on_the_way(const Node* node) const {
    const auto found = leads_.find(node);
    return found != leads_.end() && found->second;
  }
  bool stop(const Node* node) const { return stops_.contains(node); }
  // Operations on the way, without those where it ends. They live as long as this does, whatever is cut.
  const std::vector<std::shared_ptr<Node>>& operations() const { return operations_; }
  // One of our layers, all of whose other ways lead to the end, so that its parameters' gradients alone are left to make.
  BackwardNode* our_layer(Node& node) const {
    auto* const layer = dynamic_cast<BackwardNode*>(&node);
    if (!layer) return nullptr;
    const auto parameters = layer->parameters();
    for (std::size_t at = 0; at < node.next_edges().size(); ++at) {
      const auto& edge = node.next_edge(at);
      const bool parameter = std::find(parameters.begin(), parameters.end(), at) != parameters.end();
      if (edge.is_valid() && on_the_way(edge.function.get()) == parameter) return nullptr;
    }
    return layer;
  }
  // Whether a parameter hangs on it.
  bool has_parameters(const Node& node) const {
    for (const auto& edge : node.next_edges())
      if (edge.is_valid() && !on_the_way(edge.function.get())) return true;
    return false;
  }

 private:
  // At the end of the longest way: what comes first in forward.
  static Node* first_with_parameters(const edge_list& roots) {
    const auto deepest = [](const edge_list& edges) {
      Node* best = nullptr;
      for (const auto& edge : edges)
        if (edge.is_valid() && (!best || edge.function->topological_nr() > best->topological_nr()))
          best = edge.function.get();
      return best;
    };
    Node* node = deepest(roots);
    if (!node || node->next_edges().empty()) return nullptr;
    while (true) {
      Node* const next = deepest(node->next_edges());
      if (!next || next->next_edges().empty()) return node;
      node = next;
    }
  }

  // A graph is deeper than a call stack may be.
  void visit(Node* root) {
    struct Step {
      Node* node;
      std::size_t next = 0;
    };
    std::vector<Step> path;
    const auto enter = [&](Node* node) {
      if (!leads_.try_emplace(node, stop(node)).second || stop(node)) return;
      path.push_back({node});
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        if (const auto& edge = node->next_edges()[next++]; edge.is_valid()) enter(edge.function.get());
        continue;
      }
      bool leads = false;
      for (const auto& edge : node->next_edges()) leads = leads || (edge.is_valid() && leads_[edge.function.get()]);
      leads_[node] = leads;
      if (leads) operations_.push_back(node->getptr());
      path.pop_back();
    }
  }

  edge_list ends_;
  std::unordered_set<const Node*> stops_;
  std::unordered_map<const Node*, bool> leads_;
  std::vector<std::shared_ptr<Node>> operations_;
};

void add_entries(WeightGradients& later, const std::shared_ptr<Node>& node, const variable_list& gradients) {
  for (std::uint32_t at = 0; at < gradients.size(); ++at) {
    if (!gradients[at].defined()) continue;
    later.entries.emplace_back(node, at);
    later.gradients.push_back(gradients[at]);
  }
}

std::unordered_set<const Node*> reached_from(const edge_list& entries) {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto enter = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
  };
  for (const auto& entry : entries) enter(entry);
  while (!open.empty()) {
    const Node* const node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) enter(edge);
  }
  return seen;
}

// What the second half of an operation must not run into again. Autograd offers no way to cut an edge, but the graph is
// ours, its edges are not constant objects, and it goes away after the second half.
void cut(Node& node, const Walk& walk) {
  for (auto& edge : const_cast<edge_list&>(node.next_edges()))
    if (edge.is_valid() && walk.on_the_way(edge.function.get())) edge = Edge();
}

}  // namespace

Tensors whole_backward(const ForwardGraph& graph, const Tensors& gradients) {
  if (!graph.outputs.empty()) execute(graph.outputs, gradients, /*keep_graph=*/false, nullptr);
  Tensors of_inputs;
  for (const auto& input : graph.inputs) of_inputs.push_back(input.grad());
  return of_inputs;
}

Tensors input_half(const ForwardGraph& graph, const Tensors& gradients, WeightGradients& later) {
  if (graph.outputs.empty()) return Tensors(graph.inputs.size());
  const Walk walk(graph);
  edge_list roots;
  Tensors given;
  for (std::size_t at = 0; at < graph.outputs.size(); ++at) {
    // An output that depends on parameters alone waits for the second half.
    const bool now = walk.on_the_way(graph.outputs[at].function.get());
    (now ? roots : later.entries).push_back(graph.outputs[at]);
    (now ? given : later.gradients).push_back(gradients[at]);
  }
  later.put_off = std::make_shared<WeightQueue>();
  std::vector<std::pair<std::shared_ptr<Node>, std::shared_ptr<variable_list>>> kept;
  std::vector<std::shared_ptr<Node>> done;
  for (const auto& node : walk.operations())
    if (BackwardNode* const layer = walk.our_layer(*node)) {
      layer->put_off(later.put_off);
    } else if (!walk.has_parameters(*node)) {
      done.push_back(node);
    } else {
      kept.emplace_back(node, std::make_shared<variable_list>());
      node->add_pre_hook(std::make_unique<Capture>(kept.back().second));
    }
  Tensors ends = roots.empty() ? Tensors(walk.ends().size()) : execute(roots, given, /*keep_graph=*/true, &walk.ends());

  for (const auto& [node, seen] : kept) {
    add_entries(later, node, *seen);
    // They have seen these gradients.
    node->pre_hooks().clear();
    node->tensor_pre_hooks().clear();
    cut(*node, walk);
  }
  for (const auto& node : done) node->release_variables();
  if (!graph.inputs.empty()) return ends;
  for (std::size_t at = 0; at < ends.size(); ++at)
    if (ends[at].defined()) later.entries.push_back(walk.ends()[at]), later.gradients.push_back(ends[at]);
  return {};
}

void weight_half(WeightGradients later) {
  if (later.put_off) {
    const auto also = reached_from(later.entries);
    auto rest = later.put_off->run([&](const Node* parameter) { return also.contains(parameter); });
    if (!rest.to.empty()) {
      auto [root, gradient] = hand_over(std::move(rest));
      later.entries.push_back(std::move(root));
      later.gradients.push_back(std::move(gradient));
    }
  }
  if (!later.entries.empty()) execute(later.entries, later.gradients, /*keep_graph=*/false, nullptr);
}

std::string unsplittable(const ForwardGraph& graph) {
  const Walk walk(graph);
  for (const auto& operation : walk.operations()) {
    const Node& node = *operation;
    // A Function of a user's has one backward for everything.
    const std::string name = c10::demangle(typeid(node).name());
    constexpr std::string_view opaque = "torch::autograd::CppNode<";
    if (!walk.has_parameters(node) || !name.starts_with(opaque)) continue;
    return name.substr(opaque.size(), name.size() - opaque.size() - 1);
  }
  return {};
}

}  // namespace bonfire
