#include "bonfire/pipeline/unit_costs.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/hear.h"
#include "bonfire/pipeline/halves.h"

namespace bonfire {
namespace {

// What this thread holds of the memory for tensors, more than when it was made.
class HeldMemory {
 public:
  HeldMemory() : guard_(c10::DebugInfoKind::PROFILER_STATE, account_) {}
  std::int64_t bytes() const { return account_->bytes; }

 private:
  struct Account : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override { bytes += size; }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t bytes = 0;
  };
  std::shared_ptr<Account> account_ = std::make_shared<Account>();
  c10::DebugInfoGuard guard_;
};

struct Passed {
  Tensors outputs;
  double forward = 0, backward = 0;  // seconds
  std::int64_t kept = 0;             // bytes between the two
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
  const auto now = [&] {
    synchronize(device);
    return 1e-9 * static_cast<double>(options.clock());
  };
  Passed passed;
  const double begin = now();
  {
    const HeldMemory held;
    passed.outputs = unit.forward(leaves, example);
    passed.kept = held.bytes();
  }
  const double middle = now();
  Tensors gradients;
  for (std::size_t at = 0; at < (last ? 1 : passed.outputs.size()); ++at)
    if (passed.outputs[at].requires_grad()) {
      graph.outputs.push_back(torch::autograd::impl::gradient_edge(passed.outputs[at]));
      gradients.push_back(at::ones_like(passed.outputs[at]));
    }
  whole_backward(graph, gradients);
  const double end = now();
  passed.forward = middle - begin;
  passed.backward = end - middle;
  // Values alone go on, with whether the next one makes a gradient of them.
  for (auto& output : passed.outputs) output = output.detach().set_requires_grad(output.requires_grad());
  return passed;
}

// Between, where there is an even number. REQUIRES: not empty.
double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  const double place = part * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const auto above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

std::int64_t tensor_bytes(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }

}  // namespace

std::vector<UnitCost> profile_units(const Chain& chain, const Microbatch& example, const CostOptions& options) {
  require(options.repeats > 0, "Units are measured {} times; allowed: 1 or more", options.repeats);
  const at::AutoGradMode differentiate(true);
  std::vector<UnitCost> costs;
  Tensors values = example.input;
  const int units = static_cast<int>(chain.units.size());
  for (int number = 0; number < units; ++number) {
    const StageModule unit = chain.build({number, number + 1});
    UnitCost cost{.least = std::numeric_limits<double>::infinity()};
    for (const auto& parameter : unit.module->parameters()) {
      cost.parameter_bytes += tensor_bytes(parameter);
      if (parameter.requires_grad()) cost.trained_bytes += tensor_bytes(parameter);
    }
    Tensors outputs;
    std::vector<double> forwards, backwards;
    for (int time = 0; time <= options.repeats; ++time) {
      auto passed = pass(unit, values, {example, options, number + 1 == units});
      outputs = std::move(passed.outputs);
      if (time == 0) continue;
      cost.least = std::min(cost.least, passed.forward + passed.backward);
      cost.saved_bytes = std::max<std::int64_t>(cost.saved_bytes, passed.kept);
      forwards.push_back(passed.forward);
      backwards.push_back(passed.backward);
    }
    for (const auto& output : outputs)
      if (number + 1 < units) cost.output_bytes += tensor_bytes(output);
    cost.forward = quantile(forwards, 0.5);
    cost.backward = quantile(backwards, 0.5);
    cost.forward_spread = quantile(forwards, 0.75) - quantile(forwards, 0.25);
    cost.backward_spread = quantile(backwards, 0.75) - quantile(backwards, 0.25);
    costs.push_back(cost);
    values = std::move(outputs);
  }
  return costs;
}

std::vector<double> measure_units(const Chain& chain, const Microbatch& example, const CostOptions& options) {
  std::vector<double> least;
  for (const auto& cost : profile_units(chain, example, options)) least.push_back(cost.least);
  return least;
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
