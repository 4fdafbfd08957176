#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "bonfire/shard/driver.h"
#include "bonfire/shard/flat_group.h"
#include "bonfire/shard/seam_hooks.h"

namespace bonfire {

// Drives a user's module: its Units' seams gather parameters and free them, and gradients are reduced while the backward
// runs that the user has asked for.
class SeamDriver final : public Driver {
 public:
  // Puts hooks on the Units. `flats` outlives this. Throws ConfigError for a root that is no Unit, where it has to be one.
  SeamDriver(FlatGroup& flats, torch::nn::Module& module);

  // Adds the gradients of `loss` to those of the step; with `last`, they are averaged. Of several, the first is the one
  // whose gradients are reduced first. Collective.
  static void backward(const std::vector<SeamDriver*>& drivers, const at::Tensor& loss, bool last,
                       const BackwardOptions& how);
  // Takes part in the steps of the others; see Engine::finish (uneven.cpp). Collective.
  void finish(const std::function<void()>& step);

  void laid_out() override { hooks_.laid_out(); }
  void training_changed() override;
  bool meet() override { return residency() && residency()->meet(); }
  bool ranks_differ() const override { return residency() && !joining_ && residency()->ranks_differ(); }
  void before_reduction(const FlatParameter& flat) override;
  void before_update() override;
  void abandon() override;

 private:
  class InOrder;

  const ShardSettings& settings() const { return flats_.settings(); }
  Residency* residency() const { return hooks_.residency(); }  // null: memory does not come and go
  // `in_company`: as in BackwardKind.
  void begin_backward(bool last, bool in_company = false);
  void end_gradients();

  // --- Uneven inputs (uneven.cpp).
  // Two numbers, summed over all ranks. Collective.
  struct Announcement {
    at::Tensor values;
    Work work;
    std::pair<double, double> heard();
  };
  Announcement announce(double first, double second) const;
  void announce_pass(bool differentiates);
  void announce_backward(bool last);
  bool join_others();
  // Averages are over the ranks that had data.
  void scale_gradients();

  FlatGroup& flats_;
  SeamHooks hooks_;
  double active_ = 1;     // ranks that had data for the backward
  bool joining_ = false;  // this one has none any more
};

}  // namespace bonfire
