#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

class Engine;
class FlatParameter;
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
  GradScaler* scaler = nullptr;  // the loss was scaled by it
  bool skip_non_finite = false;  // a step whose gradients hold NaN or infinity changes nothing
};

struct StepResult {
  // Of all gradients, before clipping; NaN where nobody asked (no clip, no scaler, no skipping).
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();
  bool skipped = false;
};

// Updates the flat parameters of an engine, a whole buffer in one pass.
class BONFIRE_API Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Uses the gradients, then declares them spent. All ranks decide alike, since their gradients are equal.
  StepResult step(const StepOptions& options = {});

  double lr() const { return lr_; }
  void set_lr(double lr) { lr_ = lr; }
  // Steps that changed something.
  std::int64_t steps() const { return steps_; }
  // Bytes of state on this rank.
  std::int64_t state_bytes() const;

 protected:
  // A stretch of a flat parameter whose segments share their settings.
  struct Stretch {
    std::int64_t begin = 0, length = 0;
    double lr_factor = 1, weight_decay = 0;
  };
  struct Range {
    at::Tensor master, gradient, low_precision;
    std::vector<at::Tensor> state;  // in the order of state_names
    double lr = 0, weight_decay = 0, gradient_scale = 1;
  };

  struct Common {
    double lr = 1e-3;
    double weight_decay = 0;
    std::vector<ParameterRule> rules{};
  };

  Optimizer(Engine& engine, Common common, std::vector<std::string> state_names);

  // Stream: the current one. Updates one stretch; `steps()` already counts this step.
  virtual void update(const Range& range) = 0;

 private:
  struct FlatState {
    std::vector<at::Tensor> tensors;  // one per name, as long as the master
    std::vector<Stretch> stretches;
  };
  void follow_layout();
  std::vector<Stretch> stretches_of(const FlatParameter& flat) const;

  Engine& engine_;
  std::vector<std::string> state_names_;
  double lr_, weight_decay_;
  std::vector<ParameterRule> rules_;
  std::int64_t steps_ = 0;
  std::int64_t layout_version_ = -1;
  std::vector<FlatState> states_;
  // Where each segment's state lies, to find it again when the layout changes: name to (flat, offset, elements).
  struct Place {
    std::size_t flat;
    std::int64_t offset, elements;
  };
  std::map<std::string, Place> places_;
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
  Adam(Engine& engine, const AdamOptions& options = {}) : Adam(engine, options, false) {}

 protected:
  Adam(Engine& engine, const AdamOptions& options, bool decoupled);
  void update(const Range& range) override;

 private:
  AdamOptions options_;
  bool decoupled_;
};

// Adam with decoupled weight decay.
class BONFIRE_API AdamW : public Adam {
 public:
  AdamW(Engine& engine, const AdamOptions& options = {.weight_decay = 0.01}) : Adam(engine, options, true) {}
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
  Sgd(Engine& engine, const SgdOptions& options = {});

 protected:
  void update(const Range& range) override;

 private:
  SgdOptions options_;
};

}  // namespace bonfire
