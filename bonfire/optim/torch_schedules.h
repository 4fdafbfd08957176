#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "bonfire/base/error.h"
#include "bonfire/optim/optimizer.h"

namespace bonfire {

// An optimizer of ours as torch's schedulers see one, for its learning rate alone:
//   bonfire::ForSchedulers rates(optimizer);
//   torch::optim::StepLR scheduler(rates, 30, 0.1);
// It must not outlive the optimizer.
class ForSchedulers final : public torch::optim::Optimizer {
 public:
  explicit ForSchedulers(bonfire::Optimizer& ours)
      : Optimizer(std::vector{torch::optim::OptimizerParamGroup({}, std::make_unique<Rate>(ours))},
                  std::make_unique<Rate>(ours)) {}

  at::Tensor step(LossClosure) override { fail("ForSchedulers has no step: call that of the optimizer it was made for"); }

 private:
  class Rate final : public torch::optim::OptimizerOptions {
   public:
    explicit Rate(bonfire::Optimizer& ours) : ours_(&ours) {}
    std::unique_ptr<OptimizerOptions> clone() const override { return std::make_unique<Rate>(*this); }
    double get_lr() const override { return ours_->lr(); }
    void set_lr(const double lr) override { ours_->set_lr(lr); }

   private:
    bonfire::Optimizer* ours_;
  };
};

}  // namespace bonfire
