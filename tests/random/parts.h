#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "bonfire/base/random.h"
#include "tests/random/module_case.h"

// Modules from their descriptions: for the engine, with Units and layers of ours; for the oracle, of plain torch alone.
namespace bonfire::cases {

// Numbers of a size between 0.1 and 0.5, of either sign, that follow from the key.
at::Tensor numbers(const Random& random, at::IntArrayRef shape);

// Where a forward is, and whether it is to throw.
struct Context {
  int event = 0;
  int rank = 0;
  enum class Throws { nowhere, in_forward, in_backward } throws = Throws::nowhere;
  int after = 0;  // which call of the root throws
};

// What modules of one model share while they are built.
struct Nursery {
  Model model{};
  Random random{0};
  bool plain = false;  // for the oracle
  double shaken = 0;   // by how much of their size values are off
  std::map<int, at::Tensor> tied{};
  std::map<int, std::shared_ptr<class PartImpl>> shared{};
};

class LayerImpl : public torch::nn::Module {
 public:
  LayerImpl(const Layer& layer, Nursery& nursery, const std::string& path);
  at::Tensor apply(const at::Tensor& x);
  at::Tensor forward(at::Tensor x) { return x + apply(x).tanh(); }  // as a child of a Sequential
  const at::Tensor& weight() const { return first_; }

 private:
  Layer layer_;
  at::Tensor first_, second_;
  std::function<at::Tensor(const at::Tensor&)> ours_;
};

class PartImpl : public torch::nn::Module {
 public:
  PartImpl(const Part& part, Nursery& nursery, const std::string& path);
  // The stream, and the side outputs of all parts in it.
  virtual std::vector<at::Tensor> forward(at::Tensor x, const Context& context);
  bool writes_to_input() const { return part_.in_place; }

 private:
  struct Item {
    std::shared_ptr<LayerImpl> layer;
    std::shared_ptr<PartImpl> child;
    bool writes = false;  // to its input
    bool idle = false;    // its first side output is dropped
  };
  at::Tensor run(const Item& item, const at::Tensor& x, const Context& context, std::vector<at::Tensor>& sides);

  Part part_;
  bool root_;
  std::vector<Item> items_;
  std::function<at::Tensor(at::Tensor)> sequence_;
};

// A path of "" is the root's.
std::shared_ptr<PartImpl> make_part(const Part& part, Nursery& nursery, const std::string& path);

}  // namespace bonfire::cases
