#include "tests/random/parts.h"

#include <stdexcept>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>

#include "bonfire/nn/layers.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/nn/unit.h"

namespace bonfire::cases {

at::Tensor numbers(const Random& random, at::IntArrayRef shape) {
  auto values = at::empty(shape, at::kDouble);
  auto* const data = values.data_ptr<double>();
  for (std::int64_t at = 0; at < values.numel(); ++at) {
    const double number = random.uniform(static_cast<std::uint64_t>(at)) - 0.5;
    data[at] = number < 0 ? -0.1 + 0.8 * number : 0.1 + 0.8 * number;
  }
  return values;
}

namespace {

constexpr double norm_eps = 0.1;  // large, so that a width of 1 or 2 does not amplify rounding

// A module that only holds: what one of our layers has under the same names.
struct Holder : torch::nn::Module {};

}  // namespace

LayerImpl::LayerImpl(const Layer& layer, Nursery& nursery, const std::string& path) : layer_(layer) {
  const std::int64_t width = nursery.model.width, rows = nursery.model.rows;
  const auto value = [&](const std::string& key, at::IntArrayRef shape) {
    const auto values = numbers(nursery.random.fork(key), shape);
    return nursery.shaken == 0 ? values
                               : values * (1 + nursery.shaken * numbers(nursery.random.fork(key).fork("shaken"), shape));
  };
  const auto first = [&](at::IntArrayRef shape) {
    if (layer.tie < 0) return value(path + ".weight", shape);
    auto& tied = nursery.tied[layer.tie];
    if (!tied.defined()) return tied = value(fmt::format("tied {}", layer.tie), shape);
    // The oracle has one tensor, whose gradient is the sum of all uses.
    return layer.alias && !nursery.plain ? tied.detach() : tied;
  };
  std::vector<std::int64_t> shape, other;
  switch (layer.op) {
    case Op::linear:
    case Op::our_linear: shape = {width, width}, other = {width}; break;
    case Op::norm:
    case Op::our_norm: shape = {width}, other = {width}; break;
    case Op::gain: shape = {width}; break;
    case Op::scalar: break;
    case Op::odd_shape: shape = {1, width, 1}; break;
    case Op::bottleneck: shape = {layer.inner, width}, other = {width, layer.inner}; break;
    case Op::nothing: shape = {0, width}; break;
    case Op::table: shape = {rows, width}; break;
  }
  const bool has_second = layer.op == Op::bottleneck || layer.op == Op::norm || (!other.empty() && layer.bias);
  auto weight = first(shape);
  weight.set_requires_grad(!layer.frozen);
  at::Tensor bias;
  if (has_second) bias = value(path + ".bias", other).set_requires_grad(!layer.frozen_bias);
  const bool of_ours = layer.op == Op::our_linear || layer.op == Op::our_norm;
  if (!of_ours || nursery.plain) {
    // Names are those of our layers.
    torch::nn::Module* home = this;
    if (of_ours) home = register_module("ours", std::make_shared<Holder>()).get();
    first_ = home->register_parameter("weight", weight, weight.requires_grad());
    if (has_second) second_ = home->register_parameter("bias", bias, bias.requires_grad());
    return;
  }
  first_ = weight;
  if (layer.op == Op::our_linear) {
    auto ours = register_module("ours", bonfire::nn::Linear(weight, bias));
    ours_ = [ours](const at::Tensor& x) mutable { return ours->forward(x); };
  } else {
    auto ours = register_module("ours", bonfire::nn::Norm(weight, bias, norm_eps));
    ours_ = [ours](const at::Tensor& x) mutable { return ours->forward(x); };
  }
}

at::Tensor LayerImpl::apply(const at::Tensor& x) {
  if (ours_) return ours_(x);
  const std::int64_t width = layer_.op == Op::table ? 0 : x.size(-1);
  switch (layer_.op) {
    case Op::linear:
    case Op::our_linear: {
      const auto product = x.matmul(first_.t());
      return second_.defined() ? product + second_ : product;
    }
    case Op::norm: return at::layer_norm(x, {width}, first_, second_, norm_eps);
    case Op::our_norm:
      if (second_.defined()) return at::layer_norm(x, {width}, first_, second_, norm_eps);
      return x * (x.pow(2).mean(-1, true) + norm_eps).rsqrt() * first_;  // RMSNorm
    case Op::gain:
    case Op::scalar: return x * first_;
    case Op::odd_shape: return x * first_.reshape({width});
    case Op::bottleneck: return x.matmul(first_.t()).sin().matmul(second_.t());
    case Op::nothing: return x + first_.sum();
    case Op::table:
      if (!x.is_floating_point()) return at::embedding(first_, x);
      return x.matmul(first_.t()).sin().matmul(first_);
  }
  return x;
}

PartImpl::PartImpl(const Part& part, Nursery& nursery, const std::string& path) : part_(part), root_(path.empty()) {
  const auto inner = [&](int item) { return fmt::format("{}{}{}", path, path.empty() ? "" : ".", item); };
  const int layers = static_cast<int>(part.layers.size());
  if (part.sequence != Sequence::none) {
    std::vector<std::shared_ptr<LayerImpl>> list;
    for (int item = 0; item < layers; ++item)
      list.push_back(std::make_shared<LayerImpl>(part.layers[static_cast<std::size_t>(item)], nursery, inner(item)));
    const auto fill = [&](auto sequence) {
      for (auto& layer : list) sequence->push_back(layer);
      register_module("sequence", sequence);
      sequence_ = [sequence](at::Tensor x) mutable -> at::Tensor { return sequence->forward(x); };
      return sequence;
    };
    if (nursery.plain) {
      fill(torch::nn::Sequential());
    } else if (part.sequence == Sequence::wrapped) {
      auto sequence = fill(torch::nn::Sequential());
      wrap_children(sequence);
    } else {
      fill(UnitSequential(std::make_shared<UnitSequential::Impl>()));
    }
    return;
  }
  items_.resize(static_cast<std::size_t>(part.items()));
  for (const int item : part.registration) {
    auto& place = items_[static_cast<std::size_t>(item)];
    const auto name = fmt::format("{}{}", item < layers ? "layer" : "part", item);
    if (item < layers) {
      place.layer = register_module(
          name, std::make_shared<LayerImpl>(part.layers[static_cast<std::size_t>(item)], nursery, inner(item)));
      continue;
    }
    const Part& child = part.children[static_cast<std::size_t>(item - layers)];
    place.child = register_module(name, make_part(child, nursery, inner(item)));
    place.writes = child.in_place;
    place.idle = child.side == Side::idle && child.sequence == Sequence::none;
  }
}

at::Tensor PartImpl::run(const Item& item, const at::Tensor& x, const Context& context, std::vector<at::Tensor>& sides) {
  if (item.layer) return item.layer->apply(x).tanh();
  auto outputs = item.child->forward(x, context);
  sides.insert(sides.end(), outputs.begin() + (item.idle ? 2 : 1), outputs.end());
  return outputs[0];
}

std::vector<at::Tensor> PartImpl::forward(at::Tensor x, const Context& context) {
  if (part_.in_place) x.mul_(0.75);
  if (sequence_) return {sequence_(x)};
  std::vector<at::Tensor> sides;
  int number = 0;
  for (const auto& call : part_.calls) {
    int times = 1;
    if (call.when == When::odd_steps) times = context.event % 2;
    if (call.when == When::later_steps) times = context.event >= 2;
    if (call.when == When::twice_later) times = context.event >= 2 ? 2 : 1;
    if (call.when == When::odd_ranks) times = context.rank % 2;
    const auto& item = items_[static_cast<std::size_t>(call.item)];
    for (; times > 0; --times) {
      if (item.writes) x = x + 1;  // what autograd has saved must not be written to
      const auto y = run(item, x, context, sides);
      x = call.residual && x.is_floating_point() ? x + y : y;
    }
    if (!root_ || context.throws == Context::Throws::nowhere || number++ != context.after) continue;
    if (context.throws == Context::Throws::in_forward) throw std::runtime_error("asked to throw in forward");
    if (!x.requires_grad()) x = x.detach().requires_grad_(true);
    x.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("asked to throw in backward"); });
  }
  std::vector<at::Tensor> outputs{x};
  if (part_.side == Side::made || part_.side == Side::idle) outputs.push_back(x.sin());
  if (part_.side == Side::weight && !items_.empty() && items_.front().layer)
    outputs.push_back(items_.front().layer->weight());
  outputs.insert(outputs.end(), sides.begin(), sides.end());
  return outputs;
}

namespace {

struct AlphaImpl : PartImpl {
  using PartImpl::PartImpl;
};
struct BetaImpl : PartImpl {
  using PartImpl::PartImpl;
};

}  // namespace

std::shared_ptr<PartImpl> make_part(const Part& part, Nursery& nursery, const std::string& path) {
  std::shared_ptr<PartImpl> made;
  if (part.shared >= 0 && nursery.shared.contains(part.shared)) return nursery.shared[part.shared];
  if (nursery.plain || part.mark == Mark::plain)
    made = std::make_shared<PartImpl>(part, nursery, path);
  else if (part.mark == Mark::alpha)
    made = std::make_shared<Unit<AlphaImpl>>(part, nursery, path);
  else
    made = std::make_shared<Unit<BetaImpl>>(part, nursery, path);
  if (part.shared >= 0) nursery.shared[part.shared] = made;
  return made;
}

}  // namespace bonfire::cases
