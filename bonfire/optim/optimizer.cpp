#include "bonfire/optim/optimizer.h"

#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

ParameterRule no_decay_below_two_dims() {
  return {[](const std::string&, const at::Tensor& parameter) { return parameter.dim() < 2; }, 1, 0};
}

Optimizer::Optimizer(Engine& engine, Common common, std::vector<std::string> state_names)
    : engine_(engine),
      state_names_(std::move(state_names)),
      lr_(common.lr),
      weight_decay_(common.weight_decay),
      rules_(std::move(common.rules)) {
  require(std::isfinite(common.lr) && common.lr >= 0, "learning rate is {}, must be a number of at least 0", common.lr);
  require(std::isfinite(common.weight_decay) && common.weight_decay >= 0,
          "weight decay is {}, must be a number of at least 0", common.weight_decay);
}

std::vector<Optimizer::Stretch> Optimizer::stretches_of(const FlatParameter& flat) const {
  std::vector<Stretch> stretches;
  const auto& segments = flat.layout().segments;
  for (std::size_t at = 0; at < segments.size() && segments[at].trained; ++at) {
    Stretch stretch{segments[at].offset, 0, 1, weight_decay_};
    for (const auto& rule : rules_) {
      if (!rule.matches(segments[at].name, flat.parameters()[at])) continue;
      stretch.lr_factor = rule.lr_factor;
      stretch.weight_decay = rule.weight_decay;
      break;
    }
    if (!stretches.empty() && stretches.back().lr_factor == stretch.lr_factor &&
        stretches.back().weight_decay == stretch.weight_decay)
      continue;
    stretches.push_back(stretch);
  }
  // Each reaches to the next, over padding, which is zero and stays zero.
  for (std::size_t at = 0; at < stretches.size(); ++at)
    stretches[at].length =
        (at + 1 < stretches.size() ? stretches[at + 1].begin : flat.layout().trained) - stretches[at].begin;
  return stretches;
}

// State is made on first use, and carried along when the engine has laid out its parameters anew.
void Optimizer::follow_layout() {
  if (layout_version_ == engine_.layout_version()) return;
  std::vector<FlatState> fresh;
  std::map<std::string, Place> places;
  for (const auto& flat : engine_.flats()) {
    auto& state = fresh.emplace_back();
    for (std::size_t name = 0; name < state_names_.size(); ++name) state.tensors.push_back(at::zeros_like(flat->master()));
    state.stretches = stretches_of(*flat);
    for (const auto& segment : flat->layout().segments) {
      if (!segment.trained) continue;
      places[segment.name] = {fresh.size() - 1, segment.offset, segment.elements};
      const auto old = places_.find(segment.name);
      if (old == places_.end()) continue;
      for (std::size_t name = 0; name < state_names_.size(); ++name)
        state.tensors[name]
            .narrow(0, segment.offset, segment.elements)
            .copy_(states_[old->second.flat].tensors[name].narrow(0, old->second.offset, old->second.elements));
    }
  }
  states_ = std::move(fresh);
  places_ = std::move(places);
  layout_version_ = engine_.layout_version();
}

StepResult Optimizer::step(const StepOptions& options) {
  const at::NoGradGuard no_grad;
  follow_layout();
  StepResult result;
  const double loss_scale = options.scaler ? options.scaler->scale() : 1;
  double gradient_scale = 1 / loss_scale;
  GradientUse use;
  if (options.clip > 0 || options.scaler || options.skip_non_finite) {
    result.gradient_norm = gradient_norm(engine_) * gradient_scale;
    const bool finite = std::isfinite(result.gradient_norm);
    if (options.scaler) {
      options.scaler->update(finite);
      use.rescaled = options.scaler->scale() / loss_scale;
    }
    if (!finite && (options.scaler || options.skip_non_finite)) {
      result.skipped = true;
      use.applied = false;
      engine_.spend_gradients(use);
      return result;
    }
    gradient_scale *= clip_factor(result.gradient_norm, options.clip);
  }

  ++steps_;
  for (std::size_t at = 0; at < states_.size(); ++at) {
    auto& flat = *engine_.flats()[at];
    const auto low = flat.low_precision();
    for (const auto& stretch : states_[at].stretches) {
      const auto part = [&](const at::Tensor& whole) {
        return whole.defined() ? whole.narrow(0, stretch.begin, stretch.length) : whole;
      };
      Range range{part(flat.master()),     part(flat.gradient()), part(low),     {},
                  lr_ * stretch.lr_factor, stretch.weight_decay,  gradient_scale};
      for (const auto& tensor : states_[at].tensors) range.state.push_back(part(tensor));
      update(range);
    }
    flat.values_changed();
  }
  engine_.spend_gradients(use);
  return result;
}

std::int64_t Optimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& state : states_)
    for (const auto& tensor : state.tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

namespace {

std::vector<std::string> adam_state(bool amsgrad) {
  std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
  if (amsgrad) names.emplace_back("max_exp_avg_sq");
  return names;
}

std::vector<std::string> sgd_state(double momentum) {
  return momentum != 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{};
}

}  // namespace

Adam::Adam(Engine& engine, const AdamOptions& options, bool decoupled)
    : Optimizer(engine, {options.lr, options.weight_decay, options.rules}, adam_state(options.amsgrad)),
      options_(options),
      decoupled_(decoupled) {
  require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
          "betas are {} and {}, must be at least 0 and less than 1", options.beta1, options.beta2);
}

void Adam::update(const Range& range) {
  adam_({.parameters = range.master,
         .gradients = range.gradient,
         .exp_avg = range.state[0],
         .exp_avg_sq = range.state[1],
         .max_exp_avg_sq = options_.amsgrad ? range.state[2] : at::Tensor(),
         .low_precision = range.low_precision},
        {.lr = range.lr,
         .beta1 = options_.beta1,
         .beta2 = options_.beta2,
         .eps = options_.eps,
         .weight_decay = range.weight_decay,
         .step = steps(),
         .gradient_scale = range.gradient_scale,
         .decoupled = decoupled_,
         .maximize = options_.maximize});
}

Sgd::Sgd(Engine& engine, const SgdOptions& options)
    : Optimizer(engine, {options.lr, options.weight_decay, options.rules}, sgd_state(options.momentum)), options_(options) {
  require(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
          "nesterov needs a momentum (it is {}) and no dampening (it is {})", options.momentum, options.dampening);
}

void Sgd::update(const Range& range) {
  sgd_({.parameters = range.master,
        .gradients = range.gradient,
        .momentum = range.state.empty() ? at::Tensor() : range.state[0],
        .low_precision = range.low_precision},
       {.lr = range.lr,
        .momentum = options_.momentum,
        .dampening = options_.dampening,
        .weight_decay = range.weight_decay,
        .step = steps(),
        .gradient_scale = range.gradient_scale,
        .nesterov = options_.nesterov,
        .maximize = options_.maximize});
}

}  // namespace bonfire
