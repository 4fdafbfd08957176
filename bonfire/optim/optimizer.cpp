#include "bonfire/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/optim/clip.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/number_slice.h"

namespace bonfire {
namespace {

// Elements of one pass on the host: 8 MiB of fp32, some hundred microseconds of copying and more of work.
constexpr std::int64_t host_piece = 2 << 20;

}  // namespace

ParameterRule no_decay_below_two_dims() {
  return {[](const std::string&, const at::Tensor& parameter) { return parameter.dim() < 2; }, 1, 0};
}

Optimizer::Optimizer(Shares& shares, Common common, std::vector<std::string> state_names)
    : shares_(shares),
      state_names_(std::move(state_names)),
      lr_(common.lr),
      weight_decay_(common.weight_decay),
      rules_(std::move(common.rules)),
      state_(state_names_.size()) {
  require(std::isfinite(common.lr) && common.lr >= 0, "learning rate is {}, must be a number of at least 0", common.lr);
  require(std::isfinite(common.weight_decay) && common.weight_decay >= 0,
          "weight decay is {}, must be a number of at least 0", common.weight_decay);
}

StepNumbers Optimizer::numbers(const Range& /*range*/) const {
  fail("this optimizer cannot step without the host: it does not override Optimizer::numbers");
}

void Optimizer::add_rule(ParameterRule rule) {
  rules_.insert(rules_.begin(), std::move(rule));
  settings_changed_ = true;
}

Optimizer::Setting Optimizer::setting_of(int stage, const plan::Segment& segment, const at::Tensor& parameter) const {
  Setting setting{.lr_factor = 1, .weight_decay = weight_decay_, .began = state_.began(stage, segment.name)};
  // Copies of a tied weight on several stages have one path there, and so the same rule.
  const auto& path = segment.placement.name;
  for (const auto& rule : rules_) {
    if (!rule.matches(path, parameter)) continue;
    setting.lr_factor = rule.lr_factor;
    setting.weight_decay = rule.weight_decay;
    break;
  }
  return setting;
}

std::vector<Optimizer::Stretch> Optimizer::stretches_of(std::size_t part, std::size_t share) const {
  const auto& of = state_.parts()[part];
  const auto& layout = of.layout;
  const auto [begin, length] = of.shares[share].share;
  std::vector<Stretch> stretches;
  for (std::size_t at = 0; at < layout.segments.size(); ++at) {
    const auto& segment = layout.segments[at];
    if (segment.region != of.shares[share].region || segment.offset >= begin + length) continue;
    const auto setting = setting_of(of.stage, segment, of.flat->parameters()[at]);
    const std::int64_t from = std::max<std::int64_t>(segment.offset - begin, 0);
    if (stretches.empty() || stretches.back().setting != setting) stretches.push_back({from, 0, setting});
  }
  // Each reaches to the next, over padding, which is zero and stays zero. Those that end before this share have no length.
  for (std::size_t at = 0; at < stretches.size(); ++at)
    stretches[at].length = (at + 1 < stretches.size() ? stretches[at + 1].begin : length) - stretches[at].begin;
  return stretches;
}

void Optimizer::add_ranges(std::size_t part, double gradient_scale, std::vector<Range>& ranges) const {
  const auto& trained = state_.parts()[part].flat->trained();
  for (std::size_t share = 0; share < trained.size(); ++share) {
    const auto& of = trained[share];
    // On the host an update goes piece by piece, so that copies from and to a device have something to hide behind.
    const std::int64_t most = of.master.device().is_cpu() ? host_piece : of.master.numel();
    for (const auto& stretch : stretches_[part][share])
      for (std::int64_t at = 0; at < stretch.length; at += most) {
        const auto length = std::min(most, stretch.length - at);
        const auto cut = [&](const at::Tensor& whole) {
          return !whole.defined() || whole.numel() == length ? whole : whole.narrow(0, stretch.begin + at, length);
        };
        auto& range = ranges.emplace_back(Range{.master = cut(of.master),
                                                .gradient = cut(of.gradient),
                                                .low_precision = cut(of.low_precision()),
                                                .state = {},
                                                .lr = lr_ * stretch.setting.lr_factor,
                                                .weight_decay = stretch.setting.weight_decay,
                                                .gradient_scale = gradient_scale,
                                                .step = steps_ - stretch.setting.began});
        if (device_.scale.defined()) {
          const auto setting = std::find(device_.settings.begin(), device_.settings.end(), stretch.setting);
          require(setting != device_.settings.end(), "a step on the device was not prepared for the layout that it meets");
          range.scale_on_device = device_.scale;
          range.numbers_on_device = device_.numbers.select(0, setting - device_.settings.begin());
        }
        for (const auto& tensor : state_.parts()[part].shares[share].tensors) range.state.push_back(cut(tensor));
      }
  }
}

void Optimizer::update_all(double gradient_scale) {
  const auto& parts = state_.parts();
  std::vector<Range> ranges;
  std::vector<std::size_t> ends;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    add_ranges(part, gradient_scale, ranges);
    ends.push_back(ranges.size());
  }
  std::vector<Conveyor::Load> loads;
  for (const auto& range : ranges) loads.push_back({range.gradient, range.low_precision, range.master});
  conveyor_.begin(std::move(loads));
  // As much at once as nobody waits for: copies from and to the host go piece by piece, and other ranks begin to fetch the
  // new values of a Unit while the next is updated.
  std::size_t updated = 0, announced = 0;
  const auto catch_up = [&](std::size_t end) {
    if (updated < end) update(std::span(ranges).subspan(updated, end - updated));
    updated = end;
  };
  for (std::size_t part = 0, at = 0; part < parts.size(); ++part) {
    const bool on_host = at < ends[part] && ranges[at].master.is_cpu();
    for (; at < ends[part]; ++at) {
      auto& range = ranges[at];
      const auto piece = conveyor_.next();
      range.gradient = piece.in;
      range.low_precision = piece.out;
      if (on_host) catch_up(at + 1);
      conveyor_.send();
    }
    if (!on_host && !parts[part].flat->is_refreshed() && part + 1 < parts.size()) continue;
    catch_up(at);
    conveyor_.flush();
    for (; announced <= part; ++announced) {
      if (ends[announced] == (announced == 0 ? 0 : ends[announced - 1])) continue;
      parts[announced].flat->end_update();
      shares().updated(announced);
    }
  }
  conveyor_.end();
  shares().finish_update();
}

namespace {

double scale_of(const StepOptions& options) { return options.scaler ? options.scaler->scale() : 1; }

}  // namespace

// Limits what is to be limited; the sum of the squares of all gradients, on the device, where somebody wants to know.
at::Tensor Optimizer::look_at_gradients(const StepOptions& options) {
  const bool may_skip = options.scaler || options.skip_non_finite;
  at::Tensor spoilt;
  if (options.clip_value > 0) {
    // An infinity is limited like any other number. Whoever would skip the step must hear of it all the same.
    if (may_skip) spoilt = local_squares(shares()).mul_(0);
    clamp_gradients(shares(), options.clip_value * scale_of(options));
  }
  if (options.clip <= 0 && !may_skip) return {};
  auto squares = local_squares(shares());
  if (spoilt.defined()) squares.add_(spoilt);
  shares().sum(squares);
  return squares;
}

void Optimizer::follow_layout() {
  if (!state_.follow(shares(), steps_) && !settings_changed_) return;
  settings_changed_ = false;
  stretches_.assign(state_.parts().size(), {});
  for (std::size_t part = 0; part < stretches_.size(); ++part)
    for (std::size_t share = 0; share < state_.parts()[part].shares.size(); ++share)
      stretches_[part].push_back(stretches_of(part, share));
}

std::vector<Slice> Optimizer::slices() {
  const at::NoGradGuard no_grad;
  follow_layout();
  const auto division = shares().division();
  std::vector<Slice> slices;
  slices.push_back(
      slice_of({.kind = "steps", .get = [this] { return steps_; }, .set = [this](std::int64_t steps) { set_steps(steps); }},
               division));
  for (const auto& part : state_.parts()) {
    for (const auto& place : part.layout.segments) {
      for (const auto& share : part.shares) {
        if (share.region != place.region) continue;
        slices.push_back(
            slice_of({.kind = "step",
                      .get = [this, stage = part.stage, own = place.name] { return steps_ - state_.began(stage, own); },
                      .set = [this, stage = part.stage,
                              own = place.name](std::int64_t steps) { state_.set_began(stage, own, steps_ - steps); }},
                     division, place.placement));
        const auto own = overlap(share.share, place);
        for (std::size_t tensor = 0; own && tensor < share.tensors.size(); ++tensor) {
          const auto values = share.tensors[tensor].narrow(0, own->begin, own->length);
          for (auto& slice : slices_of(place.placement, share.share.begin + own->begin - place.offset, values)) {
            slice.kind = state_names_[tensor];
            slice.copy = division.copy(division.factor, place.placement.copy);
            slice.copies = division.copies(division.factor);
            slices.push_back(std::move(slice));
          }
        }
      }
    }
  }
  return slices;
}

// Parameters have taken as many steps as before.
void Optimizer::set_steps(std::int64_t steps) {
  state_.delay(steps - steps_);
  steps_ = steps;
}

void Optimizer::slices_written() { settings_changed_ = true; }

StepResult Optimizer::step(const StepOptions& options) {
  require(options.clip >= 0 && options.clip_value >= 0, "clip is {} and clip_value {}, must be at least 0 (0: never)",
          options.clip, options.clip_value);
  const at::NoGradGuard no_grad;
  shares().require_gradients();
  follow_layout();
  const double loss_scale = scale_of(options);
  StepResult result;
  if (const auto squares = look_at_gradients(options); squares.defined())
    result.gradient_norm = std::sqrt(squares.item<double>()) / loss_scale;
  const bool finite = std::isfinite(result.gradient_norm);
  GradientUse use;
  if (options.scaler) {
    options.scaler->update(finite);
    use.rescaled = options.scaler->scale() / loss_scale;
  }
  result.skipped = !finite && (options.scaler || options.skip_non_finite);
  use.applied = !result.skipped;
  if (!result.skipped) {
    // Before anything counts: it throws where somebody reads what is to be updated.
    for (const auto& part : state_.parts())
      if (!part.flat->trained().empty()) part.flat->begin_update();
    ++steps_;
    update_all(clip_factor(result.gradient_norm, options.clip) / loss_scale);
  }
  shares().spend_gradients(use);
  return result;
}

void Optimizer::prepare_on_device(bool unknown) {
  follow_layout();
  auto& settings = device_.settings;
  settings.clear();
  for (const auto& part : stretches_)
    for (const auto& share : part)
      for (const auto& stretch : share)
        if (std::find(settings.begin(), settings.end(), stretch.setting) == settings.end())
          settings.push_back(stretch.setting);

  const auto device = shares().device();
  auto rows = at::empty({2, static_cast<std::int64_t>(settings.size()), static_cast<std::int64_t>(step_numbers)},
                        at::TensorOptions(at::kDouble).pinned_memory(!device.is_cpu()));
  auto* next = rows.data_ptr<double>();
  for (const bool after_change : {false, true})
    for (const auto& setting : settings) {
      Range range;
      range.lr = lr_ * setting.lr_factor;
      range.weight_decay = setting.weight_decay;
      range.step = steps_ + 1 + (unknown && after_change ? 1 : 0) - setting.began;
      const auto row = numbers(range);
      next = std::copy(row.begin(), row.end(), next);
    }
  if (!device_.changed.defined()) device_.changed = at::zeros({1}, at::TensorOptions(at::kLong).device(device));
  // Captured work reads where the table lies, so it stays there.
  auto& table = device_.table;
  if (!table.defined() || table.sizes() != rows.sizes())
    table = at::empty(rows.sizes(), at::TensorOptions(at::kDouble).device(device));
  table.copy_(rows, /*non_blocking=*/true);
}

at::Tensor Optimizer::step_on_device(const StepOptions& options, const at::Tensor& loss) {
  require(!options.scaler && options.skip_non_finite,
          "a step on the device knows no gradient scaler, and changes nothing where gradients are not finite");
  require(device_.table.defined() && !state_.follow(shares(), steps_), "a step on the device was not prepared");
  for (const auto& part : state_.parts())
    require(part.flat->options().versions == 1, "a step on the device updates in place, and {} versions are kept",
            part.flat->options().versions);
  shares().require_gradients();
  const at::NoGradGuard no_grad;
  const auto norm = look_at_gradients(options).sqrt_();
  const auto finite = at::isfinite(norm).logical_and_(at::isfinite(loss).reshape(norm.sizes()));
  const auto issued = [this](at::Tensor numbers, at::Tensor scale) {
    device_.numbers = std::move(numbers);
    device_.scale = std::move(scale);
  };
  issued(device_.table.index_select(0, device_.changed)[0],
         clip_factor(norm, options.clip).masked_fill_(finite.logical_not(), std::numeric_limits<double>::quiet_NaN()));
  try {
    device_.changed.copy_(finite.view({1}));
    update_all(1);
  } catch (...) {
    issued({}, {});
    throw;
  }
  issued({}, {});
  shares().spend_gradients();
  return norm;
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

Adam::Adam(Shares& shares, const AdamOptions& options, bool decoupled)
    : Optimizer(shares, {options.lr, options.weight_decay, options.rules}, adam_state(options.amsgrad)),
      options_(options),
      decoupled_(decoupled) {
  require(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1,
          "betas are {} and {}, must be at least 0 and less than 1", options.beta1, options.beta2);
}

AdamStep Adam::step_of(const Range& range) const {
  return {.lr = range.lr,
          .beta1 = options_.beta1,
          .beta2 = options_.beta2,
          .eps = options_.eps,
          .weight_decay = range.weight_decay,
          .step = range.step,
          .gradient_scale = range.gradient_scale,
          .decoupled = decoupled_,
          .maximize = options_.maximize};
}

StepNumbers Adam::numbers(const Range& range) const { return numbers_of(step_of(range)); }

void Adam::update(std::span<const Range> ranges) {
  std::vector<AdamBuffers> buffers;
  std::vector<AdamStep> steps;
  for (const Range& range : ranges) {
    buffers.push_back({.parameters = range.master,
                       .gradients = range.gradient,
                       .exp_avg = range.state[0],
                       .exp_avg_sq = range.state[1],
                       .max_exp_avg_sq = options_.amsgrad ? range.state[2] : at::Tensor(),
                       .low_precision = range.low_precision,
                       .gradient_scale = range.scale_on_device,
                       .numbers = range.numbers_on_device});
    steps.push_back(step_of(range));
  }
  adam_(buffers, steps);
}

Sgd::Sgd(Shares& shares, const SgdOptions& options)
    : Optimizer(shares, {options.lr, options.weight_decay, options.rules}, sgd_state(options.momentum)), options_(options) {
  require(!options.nesterov || (options.momentum > 0 && options.dampening == 0),
          "nesterov needs a momentum (it is {}) and no dampening (it is {})", options.momentum, options.dampening);
}

SgdStep Sgd::step_of(const Range& range) const {
  return {.lr = range.lr,
          .momentum = options_.momentum,
          .dampening = options_.dampening,
          .weight_decay = range.weight_decay,
          .step = range.step,
          .gradient_scale = range.gradient_scale,
          .nesterov = options_.nesterov,
          .maximize = options_.maximize};
}

StepNumbers Sgd::numbers(const Range& range) const { return numbers_of(step_of(range)); }

void Sgd::update(std::span<const Range> ranges) {
  for (const Range& range : ranges)
    sgd_({.parameters = range.master,
          .gradients = range.gradient,
          .momentum = range.state.empty() ? at::Tensor() : range.state[0],
          .low_precision = range.low_precision,
          .gradient_scale = range.scale_on_device,
          .numbers = range.numbers_on_device},
         step_of(range));
}

}  // namespace bonfire
