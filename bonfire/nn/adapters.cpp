#include "bonfire/nn/adapters.h"

#include <algorithm>
#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/name_pattern.h"
#include "bonfire/kernels/low_rank.h"
#include "bonfire/nn/init.h"

namespace bonfire {

using at::Tensor;

namespace {

LowRank low_rank(const nn::AdapterImpl& adapter, const Tensor& x) {
  const auto& part = adapter.part();
  return {.a = part.a,
          .b = part.b,
          .begin = part.begin,
          .a_sink = adapter.a_sink(),
          .b_sink = adapter.b_sink(),
          .dropout = part.dropout.options(x)};
}

void require_options(const AdapterOptions& options) {
  if (options.rank < 1) fail_config("the rank of an adapter is {}; it must be at least 1", options.rank);
  if (!(options.alpha > 0)) fail_config("the alpha of an adapter is {}; it must be above 0", options.alpha);
  if (!(options.dropout >= 0 && options.dropout < 1))
    fail_config("the dropout of an adapter is {}; it must be in [0, 1)", options.dropout);
  if (options.dropout > 0 && !options.state)
    fail_config("the dropout of an adapter is {}, without a state that says where the run is; allowed without one: 0",
                options.dropout);
}

}  // namespace

namespace nn {

AdapterImpl::AdapterImpl(AdapterPart part) : part_(std::move(part)) {
  register_parameter("a", part_.a, part_.a.requires_grad());
  register_parameter("b", part_.b, part_.b.requires_grad());
}

std::shared_ptr<GradientSink>* AdapterImpl::slot(const Tensor& parameter) {
  if (parameter.is_same(part_.a)) return &a_sink_;
  return parameter.is_same(part_.b) ? &b_sink_ : nullptr;
}

AdaptersImpl::AdaptersImpl(std::vector<AdapterPart> parts, double scale) : scale_(scale) {
  for (auto& part : parts) {
    const std::string name = part.name;
    adapters_.push_back(register_module(name, Adapter(std::move(part))));
  }
}

Tensor AdaptersImpl::add_to(const Tensor& y, const Tensor& x) const {
  std::vector<LowRank> all;
  for (const auto& adapter : adapters_) all.push_back(low_rank(*adapter, x));
  return add_low_rank(y, x, all, scale_);
}

}  // namespace nn

Tensor AdaptableLinearImpl::forward(const Tensor& x) {
  const Tensor y = at::linear(x, weight, bias);
  return adapted() ? add_low_rank(y.contiguous(), x, {low_rank(*adapter_, x)}, scale_) : y;
}

void AdaptableLinearImpl::adapt(const AdapterOptions& options, const std::string& path) {
  require_options(options);
  require(!adapted(), "layer '{}' has an adapter already", path);
  const std::int64_t in = weight.size(1), out = weight.size(0);
  scale_ = options.alpha / static_cast<double>(options.rank);
  Tensor a = at::empty({options.rank, in}, weight.options().requires_grad(false));
  // As wide as the uniform numbers that PEFT draws.
  nn::fill_normal(a, Random(options.seed).fork(path + ".adapter.a"), 1 / std::sqrt(3.0 * static_cast<double>(in)));
  Tensor b = at::zeros({out, options.rank}, a.options());
  a.set_requires_grad(true);
  b.set_requires_grad(true);
  adapter_ = register_module(
      "adapter", nn::Adapter(nn::AdapterPart{
                     .name = path, .a = a, .b = b, .dropout = Dropout(options.dropout, options.state, path + ".adapter")}));
  weight.set_requires_grad(false);
  if (bias.defined()) bias.set_requires_grad(false);
}

Tensor AdaptableLinearImpl::merged_weight() const {
  const at::NoGradGuard no_grad;
  const Tensor own = weight.detach();
  return adapted() ? own.addmm(adapter_->part().b, adapter_->part().a, 1, scale_) : own.clone();
}

std::vector<std::string> add_adapters(torch::nn::Module& module, const AdapterOptions& options) {
  require_options(options);
  std::vector<std::string> all, chosen;
  std::vector<std::pair<std::string, AdaptableLinearImpl*>> layers;
  for (const auto& child : module.named_modules("", /*include_self=*/false))
    if (auto* layer = dynamic_cast<AdaptableLinearImpl*>(child.value().get())) {
      layers.emplace_back(child.key(), layer);
      all.push_back(child.key());
    }
  if (auto* layer = dynamic_cast<AdaptableLinearImpl*>(&module)) layers.emplace_back("", layer);
  if (layers.empty())
    fail_config("{} has no bonfire::AdaptableLinear; declare the layers to adapt as such, in place of torch::nn::Linear",
                module.name());
  for (const auto& pattern : options.match)
    if (std::none_of(all.begin(), all.end(), [&](const auto& path) { return ends_with_parts(pattern, path); }))
      fail_config("\"{}\" names no layer that can be adapted; allowed: {}", pattern, fmt::join(all, " | "));
  for (const auto& [name, parameter] : module.named_parameters().pairs()) Tensor(parameter).set_requires_grad(false);
  const auto& match = options.match;
  for (const auto& [path, layer] : layers) {
    const std::string& own = path;
    if (!match.empty() &&
        std::none_of(match.begin(), match.end(), [&](const auto& pattern) { return ends_with_parts(pattern, own); }))
      continue;
    layer->adapt(options, path);
    chosen.push_back(path);
  }
  return chosen;
}

}  // namespace bonfire
