#include "tests/pipeline/skip_chain.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

namespace bonfire::testing {

at::Tensor numbers(at::IntArrayRef shape, double shift) {
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  return at::arange(count, at::kDouble).add(shift).mul(1.3).sin().mul(0.5).view(shape);
}

namespace {

// One Unit: a linear layer whose output goes on beside what the first Unit made, which the last one adds. The first and the
// last share a weight.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int unit, bool last)
      : linear(register_module("linear", torch::nn::Linear(skip_width, skip_width))),
        shared(register_parameter(last ? "output" : "input", numbers({skip_width, skip_width}, 77))) {
    linear->to(at::kDouble);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(numbers({skip_width, skip_width}, unit));
    linear->bias.copy_(numbers({skip_width}, unit + 0.5));
  }
  torch::nn::Linear linear;
  at::Tensor shared;
};

// Units 0..units-1 as one function of a list of values.
struct PartImpl : torch::nn::Module {
  PartImpl(UnitRange range, int of) : units(range), all(of) {
    for (int unit = range.begin; unit < range.end; ++unit)
      blocks.push_back(register_module(fmt::format("block{}", unit), std::make_shared<BlockImpl>(unit, unit + 1 == of)));
  }
  Tensors run(Tensors values, const Microbatch& microbatch) {
    for (int unit = units.begin; unit < units.end; ++unit) {
      auto& block = *blocks[static_cast<std::size_t>(unit - units.begin)];
      if (unit == 0) {
        const auto skip = values[0].matmul(block.shared);
        // Along goes what needs no gradient, too.
        values = {values[0], skip, at::arange(values[0].size(0)).remainder(2).unsqueeze(1)};
      }
      values[0] = values[0] + block.linear->forward(values[0]).tanh();
      if (unit + 1 < all) continue;
      const auto out = values[0].matmul(block.shared.t()) + values[1] * values[2];
      const auto wrong = out - microbatch.target[0];
      return {wrong.pow(2).sum(1).mean(), wrong.abs().max().detach()};
    }
    return values;
  }
  UnitRange units;
  int all;
  std::vector<std::shared_ptr<BlockImpl>> blocks;
};

}  // namespace

Chain skip_chain(int units) {
  Chain chain;
  for (int unit = 0; unit < units; ++unit) chain.units.push_back(fmt::format("block{}", unit));
  chain.build = [units](UnitRange range) {
    auto part = std::make_shared<PartImpl>(range, units);
    if (range.begin == 0 && range.end == units) {
      // One tensor where both uses are in one stage.
      part->blocks.back()->shared = part->blocks.front()->shared;
    }
    return StageModule{
        part, [part](Tensors values, const Microbatch& microbatch) { return part->run(std::move(values), microbatch); }};
  };
  chain.tied = {{{{0, "block0.input"}, {units - 1, fmt::format("block{}.output", units - 1)}}}};
  return chain;
}

std::vector<Microbatch> skip_batch(int microbatches, int step) {
  std::vector<Microbatch> batch;
  for (int at = 0; at < microbatches; ++at) {
    const std::int64_t samples = 2 + at % 2;
    batch.push_back(
        {.input = {numbers({samples, skip_width}, 10 * step + at)}, .target = {numbers({samples, skip_width}, at + 3)}});
  }
  return batch;
}

}  // namespace bonfire::testing
