#include "tests/pipeline/four_units.h"

#include <algorithm>
#include <memory>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/schedule/generate.h"
#include "tests/pipeline/skip_chain.h"

namespace bonfire::testing {
namespace {

constexpr std::int64_t width = 6;
constexpr int units = 4, last = units - 1;

struct UnitImpl : torch::nn::Module {
  UnitImpl(int unit, int seed, const at::Tensor& tied) : w(register_parameter("w", numbers({width, width}, seed + unit))) {
    if (unit == 0 || unit == last) t = register_parameter("t", tied.defined() ? tied : numbers({width, width}, seed + 20));
  }
  at::Tensor w, t;
};

at::Tensor run(int unit, const at::Tensor& x, const at::Tensor& w, const at::Tensor& t, const at::Tensor& target) {
  if (unit == 0) return (x + x.matmul(t)).matmul(w).tanh();
  const auto out = x.matmul(w).tanh();
  return unit == last ? (out.matmul(t) - target).pow(2).mean() : out;
}

}  // namespace

Chain four_units(int seed) {
  Chain chain{.units = {"u0", "u1", "u2", "u3"}};
  chain.build = [seed](UnitRange range) {
    auto root = std::make_shared<torch::nn::Module>();
    std::vector<std::shared_ptr<UnitImpl>> parts;
    for (int unit = range.begin; unit < range.end; ++unit) {
      const auto tied = parts.empty() ? at::Tensor() : parts.front()->t;
      parts.push_back(root->register_module(fmt::format("u{}", unit), std::make_shared<UnitImpl>(unit, seed, tied)));
    }
    return StageModule{root, [parts, range](Tensors values, const Microbatch& microbatch) {
                         auto x = values[0];
                         for (int unit = range.begin; unit < range.end; ++unit) {
                           const auto& part = *parts[static_cast<std::size_t>(unit - range.begin)];
                           x = run(unit, x, part.w, part.t, microbatch.target[0]);
                         }
                         return Tensors{x};
                       }};
  };
  chain.tied = {{{{0, "u0.t"}, {last, "u3.t"}}}};
  return chain;
}

std::vector<Microbatch> four_units_batch(int step, int data_rank) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < 2; ++at)
    batch.push_back({.input = {numbers({3, width}, 10 * step + at + 100 * data_rank)},
                     .target = {numbers({3, width}, at + 5 + data_rank)}});
  return batch;
}

PipelineOptions four_units_options(int ranks, int chunks, ShardOptions shard) {
  const char* const name = chunks > 1 ? "interleaved" : "1f1b";
  return {.schedule = schedule::generate(name, {.ranks = ranks, .microbatches = 2, .chunks = chunks}),
          .schedule_name = name,
          .shard = std::move(shard)};
}

PlainFourUnits::PlainFourUnits(int seed) {
  for (int unit = 0; unit < units; ++unit) weights[fmt::format("u{}.w", unit)] = numbers({width, width}, seed + unit);
  weights["u0.t"] = numbers({width, width}, seed + 20);
  for (auto& [name, weight] : weights) weight.requires_grad_(true);
}

double PlainFourUnits::backward(int step, int data_ranks, double scale) {
  for (auto& [name, weight] : weights) weight.mutable_grad().reset();
  double mean = 0;
  for (int rank = 0; rank < data_ranks; ++rank)
    for (const auto& microbatch : four_units_batch(step, rank)) {
      auto x = microbatch.input[0];
      for (int unit = 0; unit < units; ++unit)
        x = run(unit, x, weights.at(fmt::format("u{}.w", unit)), weights.at("u0.t"), microbatch.target[0]);
      mean += x.item<double>() / 2 / data_ranks;
      (x * (scale / 2 / data_ranks)).backward();
    }
  return mean;
}

std::vector<at::Tensor> PlainFourUnits::parameters() const {
  std::vector<at::Tensor> list;
  for (const auto& [name, weight] : weights) list.push_back(weight);
  return list;
}

double distance(Pipeline& pipeline, const PlainFourUnits& plain) {
  double worst = 0;
  for (const int stage : pipeline.local_stages()) {
    const auto whole = pipeline.engine(stage).full_parameters();
    for (const auto& item : pipeline.module(stage).named_parameters()) {
      const auto& other = plain.weights.at(item.key() == "u3.t" ? "u0.t" : item.key());
      worst = std::max(worst, (item.value() - other).abs().max().item<double>());
    }
  }
  return worst;
}

}  // namespace bonfire::testing
