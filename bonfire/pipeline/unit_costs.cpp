#include "bonfire/pipeline/unit_costs.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/pipeline/halves.h"
#include "bonfire/pipeline/hear.h"

namespace bonfire {
namespace {

struct Passed {
  Tensors outputs;
  double seconds = 0;
};

struct How {
  const Microbatch& example;
  const CostOptions& options;
  bool last = false;  // its first output alone, the loss, is differentiated
};

Passed pass(const StageModule& unit, const Tensors& values, const How& how) {
  const auto& [example, options, last] = how;
  ForwardGraph graph;
  Tensors leaves;
  for (const auto& value : values) {
    leaves.push_back(value.detach().set_requires_grad(value.requires_grad()));
    if (value.requires_grad()) graph.inputs.push_back(leaves.back());
  }
  const auto device = example.input.front().device();
  synchronize(device);
  const Nanoseconds begin = options.clock();
  Passed passed{.outputs = unit.forward(leaves, example)};
  Tensors gradients;
  for (std::size_t at = 0; at < (last ? 1 : passed.outputs.size()); ++at)
    if (passed.outputs[at].requires_grad()) {
      graph.outputs.push_back(torch::autograd::impl::gradient_edge(passed.outputs[at]));
      gradients.push_back(at::ones_like(passed.outputs[at]));
    }
  whole_backward(graph, gradients);
  synchronize(device);
  passed.seconds = 1e-9 * static_cast<double>(options.clock() - begin);
  // Values alone go on, with whether the next one makes a gradient of them.
  for (auto& output : passed.outputs) output = output.detach().set_requires_grad(output.requires_grad());
  return passed;
}

}  // namespace

std::vector<double> measure_units(const Chain& chain, const Microbatch& example, const CostOptions& options) {
  require(options.repeats > 0, "Units are measured {} times; allowed: 1 or more", options.repeats);
  const at::AutoGradMode differentiate(true);
  std::vector<double> costs;
  Tensors values = example.input;
  const int units = static_cast<int>(chain.units.size());
  for (int number = 0; number < units; ++number) {
    const StageModule unit = chain.build({number, number + 1});
    Tensors outputs;
    double least = std::numeric_limits<double>::infinity();
    for (int time = 0; time <= options.repeats; ++time) {
      auto passed = pass(unit, values, {example, options, number + 1 == units});
      if (time > 0) least = std::min(least, passed.seconds);
      outputs = std::move(passed.outputs);
    }
    costs.push_back(least);
    values = std::move(outputs);
  }
  return costs;
}

std::vector<double> agreed_costs(const Mesh& mesh, const Chain& chain, const Microbatch& example,
                                 const CostOptions& options) {
  const Group& all = mesh.group(Axis::world);
  std::string words;
  if (all.rank() == 0) {
    try {
      for (const double cost : measure_units(chain, example, options)) words += fmt::format("{} ", cost);
    } catch (const std::exception& error) {
      const std::string what = error.what();
      words = "! " + what.substr(0, what.find('\n'));
    }
  }
  words = hear(all, words, 0, example.input.front().device());
  if (words.starts_with("! ")) fail("measuring the Units: {}", words.substr(2));
  std::istringstream numbers(words);
  std::vector<double> costs;
  for (double cost = 0; numbers >> cost;) costs.push_back(cost);
  return costs;
}

}  // namespace bonfire
