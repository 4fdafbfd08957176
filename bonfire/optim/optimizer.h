#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/optim/conveyor.h"
#include "bonfire/optim/share_state.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

class GradScaler;

// What some parameters get in place of the optimizer's own values. The first rule that matches a parameter decides.
struct ParameterRule {
  std::function<bool(const std::string& name, const at::Tensor& parameter)> matches;
  double lr_factor = 1;  // multiplies the learning rate
  double weight_decay = 0;
};

// Norms and biases: everything with fewer than two dimensions goes without weight decay.
BONFIRE_API ParameterRule no_decay_below_two_dims();

struct StepOptions {
  double clip = 0;               // gradients longer than this, over all parameters, are shortened to it; 0: never
  double clip_value = 0;         // before that, each element is limited to [-clip_value, clip_value]; 0: never
  GradScaler* scaler = nullptr;  // the loss was scaled by it
  bool skip_non_finite = false;  // a step whose gradients hold NaN or infinity changes nothing
};

struct StepResult {
  // Of all gradients, after `clip_value` and before `clip`; NaN where nobody asked (no clip, no scaler, no skipping).
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();
  bool skipped = false;
};

// Updates the parameters of an Engine, or of all stages of a Pipeline: of each, the share that is this rank's own. Where
// masters lie on the host the update is done there, on all cores, while gradients come from the device and new values go
// back. For an optimizer of your own, write update().
class BONFIRE_API Optimizer : public Sliced {
 public:
  ~Optimizer() override = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Uses the gradients, then declares them spent. All ranks decide alike, since the norm is of all ranks' shares.
  // Of a pipeline, all stages are updated: one norm, one decision.
  // Collective where shares are divided or on other stages: the norm, where somebody asked, and the new values where others
  // hold copies.
  StepResult step(const StepOptions& options = {});

  // --- A step that the device decides alone, so that it can be captured once and done again and again.
  // The same work as `step` with skip_non_finite, without the host: returns the norm, one fp64 element on the device.
  // Nothing changes where that or `loss`, one element, is not finite. Learning rate and number of the step are read from
  // memory on the device that prepare_on_device writes. REQUIRES: prepare_on_device was called since the layout last
  // changed. Collective.
  at::Tensor step_on_device(const StepOptions& options, const at::Tensor& loss);
  // Stream: what comes after it and was made by step_on_device is the step that comes next. `unknown`: the device may not
  // have done the step before, or done it without changing anything; told_by_device has not been called for it.
  void prepare_on_device(bool unknown);
  // Whether a step of the device, the oldest that was not told yet, has changed something.
  void told_by_device(bool changed) { steps_ += changed ? 1 : 0; }

  // The state of every trained parameter by its path: what the optimizer remembers ("exp_avg", ...), and how many steps were
  // taken with it ("step"); and the steps of the optimizer ("steps").
  std::vector<Slice> slices() override;
  void slices_written() override;

  // From now on the parameters that it matches have its settings, whatever rules there are already.
  void add_rule(ParameterRule rule);

  double lr() const { return lr_; }
  void set_lr(double lr) { lr_ = lr; }
  // Steps that changed something.
  std::int64_t steps() const { return steps_; }
  // Bytes of state on this rank.
  std::int64_t state_bytes() const { return state_.bytes(); }

 protected:
  // One pass of an update: a part of a share whose segments have one setting.
  struct Range {
    at::Tensor master, gradient;    // 1-D, of one length; the gradient may be of another dtype
    at::Tensor low_precision;       // where forward reads a rounded copy: the master's new values go here as well
    std::vector<at::Tensor> state;  // in the order of state_names; zeros at first
    double lr = 0, weight_decay = 0;
    double gradient_scale = 1;  // what the gradient is multiplied with before it is used: clipping, a loss scale
    std::int64_t step = 1;      // of these parameters: 1 for their first
    // Where the device decides: what multiplies gradient_scale (not a number: no change), and `numbers` instead of all
    // above.
    at::Tensor scale_on_device{}, numbers_on_device{};
  };

  struct Common {
    double lr = 1e-3;
    double weight_decay = 0;
    std::vector<ParameterRule> rules{};
  };

  Optimizer(Shares& shares, Common common, std::vector<std::string> state_names);

  // `state_names`: of the tensors that it remembers for each element. Stream: the current one.
  virtual void update(std::span<const Range> ranges) = 0;
  // What a step of the device multiplies with; throws unless it was written, like update() by kernels that take
  // Range::numbers_on_device.
  virtual StepNumbers numbers(const Range& range) const;

 private:
  Shares& shares() const { return shares_.get(); }

  // A stretch of a share, in elements of the share, whose segments share their settings.
  struct Setting {
    double lr_factor = 1, weight_decay = 0;
    std::int64_t began = 0;
    bool operator==(const Setting&) const = default;
  };
  struct Stretch {
    std::int64_t begin = 0, length = 0;
    Setting setting{};
  };
  Setting setting_of(int stage, const plan::Segment& segment, const at::Tensor& parameter) const;
  std::vector<Stretch> stretches_of(std::size_t part, std::size_t share) const;
  void follow_layout();
  void set_steps(std::int64_t steps);
  at::Tensor look_at_gradients(const StepOptions& options);
  void add_ranges(std::size_t part, double gradient_scale, std::vector<Range>& ranges) const;
  void update_all(double gradient_scale);

  // What steps of the device read.
  struct OnDevice {
    std::vector<Setting> settings{};  // all different ones
    at::Tensor table{};               // [2, settings, step_numbers]: for a step after one that changed nothing, or something
    at::Tensor changed{};             // whether the last one did: 0 or 1
    at::Tensor numbers{}, scale{};    // of the step that is being issued
  };

  SharesRef shares_;
  std::vector<std::string> state_names_;
  double lr_, weight_decay_;
  std::vector<ParameterRule> rules_;
  std::int64_t steps_ = 0;
  ShareState state_;
  bool settings_changed_ = false;                             // since stretches were measured
  std::vector<std::vector<std::vector<Stretch>>> stretches_;  // by part and share
  Conveyor conveyor_;
  OnDevice device_;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  std::vector<ParameterRule> rules{};
};

// Adam as published: weight decay is added to the gradient.
class BONFIRE_API Adam : public Optimizer {
 public:
  explicit Adam(Shares& shares, const AdamOptions& options = {}) : Adam(shares, options, false) {}

 protected:
  Adam(Shares& shares, const AdamOptions& options, bool decoupled);
  void update(std::span<const Range> ranges) override;
  StepNumbers numbers(const Range& range) const override;

 private:
  AdamStep step_of(const Range& range) const;

  AdamOptions options_;
  bool decoupled_;
};

// Adam with decoupled weight decay.
class BONFIRE_API AdamW : public Adam {
 public:
  explicit AdamW(Shares& shares, const AdamOptions& options = {.weight_decay = 0.01}) : Adam(shares, options, true) {}
};

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  std::vector<ParameterRule> rules{};
};

class BONFIRE_API Sgd : public Optimizer {
 public:
  explicit Sgd(Shares& shares, const SgdOptions& options = {});

 protected:
  void update(std::span<const Range> ranges) override;
  StepNumbers numbers(const Range& range) const override;

 private:
  SgdStep step_of(const Range& range) const;

  SgdOptions options_;
};

}  // namespace bonfire
