#include "tests/pipeline/pipedream_oracle.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tests/pipeline/skip_chain.h"

namespace bonfire::testing {
namespace {

at::Tensor first_weight(int unit) { return numbers({tower_width, tower_width}, 3 * unit + 1); }
at::Tensor first_bias(int unit) { return numbers({tower_width}, 7 * unit + 2); }

at::Tensor apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return (x.matmul(weight) + bias).tanh() + 0.5 * x;
}

at::Tensor loss_between(const at::Tensor& x, const at::Tensor& target) { return (x - target).pow(2).mean(); }

struct FloorImpl : torch::nn::Module {
  FloorImpl(int unit, at::Device device)
      : weight(register_parameter("weight", first_weight(unit).to(device))),
        bias(register_parameter("bias", first_bias(unit).to(device))) {}
  at::Tensor weight, bias;
};

}  // namespace

Chain tower(int units, at::Device device) {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back(fmt::format("floor{}", unit));
  chain.build = [units, device](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<std::shared_ptr<FloorImpl>> floors;
    for (int unit = range.begin; unit < range.end; ++unit)
      floors.push_back(root->register_module(fmt::format("floor{}", unit), std::make_shared<FloorImpl>(unit, device)));
    return StageModule{root, [floors, last = range.end == units](Tensors values, const Microbatch& microbatch) {
                         auto x = values[0];
                         for (const auto& floor : floors) x = apply(x, floor->weight, floor->bias);
                         return Tensors{last ? loss_between(x, microbatch.target[0]) : x};
                       }};
  };
  return chain;
}

std::vector<Microbatch> tower_minibatch(std::int64_t number, int microbatches, at::Device device) {
  std::vector<Microbatch> minibatch;
  for (int at = 0; at < microbatches; ++at) {
    const auto shift = static_cast<double>(number * 31 + at * 5);
    const std::int64_t samples = 2 + (number + at) % 2;
    minibatch.push_back({.input = {numbers({samples, tower_width}, shift).to(device)},
                         .target = {numbers({samples, tower_width}, shift * 0.3 + 11).to(device)}});
  }
  return minibatch;
}

std::vector<Microbatch> minibatch_of(const OracleRun& run, std::int64_t number, at::Device device) {
  auto minibatch = tower_minibatch(number, run.microbatches, device);
  if (run.weighed)
    for (std::size_t at = 0; at < minibatch.size(); ++at)
      minibatch[at].weight = static_cast<double>((number + 2 * static_cast<std::int64_t>(at)) % 3);
  return minibatch;
}

Oracle::Oracle(OracleRun run) : run_(std::move(run)) {
  const auto stages = run_.units.size();
  int unit = 0;
  for (std::size_t stage = 0; stage < stages; ++stage) {
    Weights weights;
    for (int at = 0; at < run_.units[stage]; ++at, ++unit) {
      weights.push_back(first_weight(unit));
      weights.push_back(first_bias(unit));
    }
    Weights zeros;
    for (const auto& weight : weights) zeros.push_back(at::zeros_like(weight));
    versions_.push_back({weights});
    first_.push_back(zeros);
    second_.push_back(zeros);
    gradients_.push_back(zeros);
  }
  // Moments are changed in place: each has its own.
  for (auto* moments : {&first_, &second_, &gradients_})
    for (auto& of_stage : *moments)
      for (auto& moment : of_stage) moment = moment.clone();
  gathered_.assign(stages, 0);
  updates_.assign(stages, 0);
  stalest_.assign(stages, 0);
  base_.assign(stages, 0);
  staleness_.resize(stages);
}

// As published, with rounds of replicas in place of minibatches: how many updates a stage has seen, since the pipeline was
// empty, in the weights that a minibatch uses.
std::int64_t Oracle::version(int stage, std::int64_t minibatch) const {
  const auto on = [&](std::size_t at) {
    const int ranks = std::accumulate(run_.replicas.begin() + static_cast<std::ptrdiff_t>(at), run_.replicas.end(), 0);
    const auto depth = (ranks + run_.replicas[at] - 1) / run_.replicas[at];
    return std::max<std::int64_t>(0, minibatch / run_.replicas[at] - depth + 1);
  };
  const auto here = static_cast<std::size_t>(stage);
  if (run_.mode == "pipedream") return on(here);
  if (run_.mode == "pipedream-vertical") return on(0) * run_.replicas[0] / run_.replicas[here];
  return run_.mode == "pipedream-2bw" ? std::max<std::int64_t>(0, minibatch - 1) : minibatch;
}

void Oracle::train(std::int64_t minibatches) {
  const bool in_turn = run_.mode == "pipedream" || run_.mode == "pipedream-vertical";
  for (std::int64_t end = number_ + minibatches; number_ < end; ++number_, ++since_drain_) {
    const auto minibatch = minibatch_of(run_, number_);
    const auto weight_of = [](const Microbatch& one) {
      return one.weight ? *one.weight : static_cast<double>(one.input[0].size(0));
    };
    double all = 0, loss = 0;
    for (const auto& microbatch : minibatch) all += weight_of(microbatch);
    std::vector<Weights> used;
    for (std::size_t stage = 0; stage < versions_.size(); ++stage) {
      const auto which = base_[stage] + static_cast<std::size_t>(version(static_cast<int>(stage), since_drain_));
      stalest_[stage] = std::max(stalest_[stage], static_cast<int>(versions_[stage].size() - 1 - which));
      Weights leaves;
      for (const auto& weight : versions_[stage].at(which)) leaves.push_back(weight.clone().set_requires_grad(true));
      used.push_back(leaves);
    }
    for (const auto& microbatch : minibatch) {
      auto x = microbatch.input[0];
      for (const auto& weights : used)
        for (std::size_t at = 0; at < weights.size(); at += 2) x = apply(x, weights[at], weights[at + 1]);
      const auto mean = loss_between(x, microbatch.target[0]) * (all > 0 ? weight_of(microbatch) / all : 0);
      mean.backward();
      loss += mean.item<double>();
    }
    losses_.push_back(loss);
    for (std::size_t stage = 0; stage < used.size(); ++stage) {
      const int round = in_turn ? run_.replicas[stage] : 1;
      for (std::size_t at = 0; at < used[stage].size(); ++at) gradients_[stage][at].add_(used[stage][at].grad() / round);
      if (++gathered_[stage] == round) update(stage);
    }
  }
}

void Oracle::update(std::size_t stage) {
  staleness_[stage].push_back(stalest_[stage]);
  gathered_[stage] = stalest_[stage] = 0;
  const int step = ++updates_[stage];
  double squares = 0;
  for (const auto& gradient : gradients_[stage]) squares += gradient.pow(2).sum().item<double>();
  const double norm = std::sqrt(squares);
  Weights next;
  for (std::size_t at = 0; at < gradients_[stage].size(); ++at) {
    auto& gradient = gradients_[stage][at];
    if (run_.clip > 0 && norm > run_.clip) gradient.mul_(run_.clip / (norm + 1e-6));
    const auto& weight = versions_[stage].back()[at];
    auto& first = first_[stage][at];
    auto& second = second_[stage][at];
    if (run_.adam) {
      first.mul_(0.9).add_(gradient, 0.1);
      second.mul_(0.999).addcmul_(gradient, gradient, 0.001);
      const auto mean = first / (1 - std::pow(0.9, step)), square = second / (1 - std::pow(0.999, step));
      next.push_back(weight - run_.lr * mean / (square.sqrt() + 1e-8));
    } else {
      step == 1 ? first.copy_(gradient) : first.mul_(run_.momentum).add_(gradient);
      next.push_back(weight - run_.lr * first);
    }
    gradient.zero_();
  }
  versions_[stage].push_back(next);
}

void Oracle::drain() {
  since_drain_ = 0;
  for (std::size_t stage = 0; stage < versions_.size(); ++stage) base_[stage] = versions_[stage].size() - 1;
}

std::map<std::string, at::Tensor> Oracle::weights() const {
  std::map<std::string, at::Tensor> named;
  int unit = 0;
  for (const auto& versions : versions_)
    for (std::size_t at = 0; at < versions.back().size(); at += 2, ++unit) {
      named[fmt::format("floor{}.weight", unit)] = versions.back()[at];
      named[fmt::format("floor{}.bias", unit)] = versions.back()[at + 1];
    }
  return named;
}

double Oracle::loss_of(const std::vector<Microbatch>& microbatches) const {
  double sum = 0, samples = 0;
  for (const auto& microbatch : microbatches) {
    auto x = microbatch.input[0];
    for (const auto& versions : versions_)
      for (std::size_t at = 0; at < versions.back().size(); at += 2)
        x = apply(x, versions.back()[at], versions.back()[at + 1]);
    const auto count = static_cast<double>(microbatch.input[0].size(0));
    sum += loss_between(x, microbatch.target[0]).item<double>() * count;
    samples += count;
  }
  return sum / samples;
}

}  // namespace bonfire::testing
