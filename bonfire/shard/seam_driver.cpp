#include "bonfire/shard/seam_driver.h"

#include <algorithm>
#include <utility>

#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/guards.h"

namespace bonfire {
namespace {

// Parameters come and go where the root runs, and outputs are cast where its forward ends: that has to be known.
torch::nn::Module& checked_root(const ShardSettings& settings, torch::nn::Module& module) {
  if (settings.comes_and_goes() || settings.options.precision.outputs) require_marked_root(module);
  return module;
}

bool casts(const FlatGroup& flats) {
  const auto& settings = flats.settings();
  const auto& precision = settings.options.precision;
  const auto& parameters = flats.layout().parameters();
  // A seam keeps what it is given until forward has ended: none where nothing is rounded.
  const bool rounds = std::any_of(parameters.begin(), parameters.end(),
                                  [](const LaidParameter& parameter) { return parameter.compute != parameter.master; });
  return rounds || precision.outputs || settings.options.unit ||
         (precision.parameters && (precision.keep || settings.comes_and_goes()));
}

}  // namespace

// Of several drivers of one backward, each reduces after the one before it.
class SeamDriver::InOrder {
 public:
  explicit InOrder(const std::vector<SeamDriver*>& drivers) : drivers_(drivers) {
    for (std::size_t at = 1; at < drivers_.size(); ++at) drivers_[at]->flats_.reduce_after(&drivers_[at - 1]->flats_);
  }
  ~InOrder() {
    for (auto* driver : drivers_) driver->flats_.reduce_after(nullptr);
  }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  const std::vector<SeamDriver*>& drivers_;
};

SeamDriver::SeamDriver(FlatGroup& flats, torch::nn::Module& module)
    : flats_(flats),
      hooks_(flats, checked_root(flats.settings(), module),
             {.casts = casts(flats), .before_pass = [this](bool differentiates) {
                announce_pass(differentiates);
                flats_.follow_freezing();
              }}) {
  if (settings().factors.parameters > 1 && settings().groups.all.rank() == 0)
    warn_of_unmarked(module, flats.layout().groups(), settings().options);
}

void SeamDriver::training_changed() {
  if (residency()) residency()->forget_courses();
}

void SeamDriver::before_reduction(const FlatParameter& flat) {
  if (residency()) residency()->leave_out(flat);
}

void SeamDriver::before_update() {
  if (residency()) residency()->before_update();
}

void SeamDriver::abandon() {
  if (residency()) residency()->abandon_pass();
}

// Gradients that are kept as shares are reduced in every microbatch.
void SeamDriver::begin_backward(bool last, bool in_company) {
  if (!residency()) flats_.follow_freezing();
  flats_.begin_gradients({.reduces = last || settings().reduces_every_microbatch(), .last = last, .in_company = in_company});
  if (joining_) return flats_.expect_none();
  if (!residency()) return;
  // Units that were not used are ready, on a rank that others may be waiting for.
  for (std::size_t at = 0; at < flats_.flats().size(); ++at)
    if (!residency()->expects_backward(*flats_.flats()[at])) flats_.expect_none(at);
  if (flats_.backward().how().reduces) flats_.reduce_ready();
}

void SeamDriver::end_gradients() {
  // Nothing comes any more. Others may wait for what this rank has left out, or for its word on the next gather.
  if (residency() && flats_.backward().how().reduces && !residency()->follows_course()) flats_.reducer().hurry();
  flats_.end_gradients();
}

void SeamDriver::backward(const std::vector<SeamDriver*>& drivers, const at::Tensor& loss, bool last,
                          const BackwardOptions& how) {
  const InOrder order(drivers);
  std::vector<SeamDriver*> begun;
  try {
    for (auto* driver : drivers) {
      for (const auto& flat : driver->flats_.flats()) flat->require_intact();
      if (driver->residency()) driver->residency()->begin_backward(how.retain_graph);
      driver->announce_backward(last);
      driver->begin_backward(last, drivers.size() > 1);
      begun.push_back(driver);
    }
    for (auto* driver : drivers) driver->flats_.require_same_training();
    auto* const trace = drivers.front()->settings().options.trace;
    {
      const TraceScope span(trace, "backward", "compute", "compute");
      loss.backward(how.gradient, how.retain_graph);
    }
    const TraceScope span(trace, "wait for reductions", "wait", "compute");
    for (auto* driver : drivers) driver->end_gradients();
    for (auto* driver : drivers)
      if (driver->residency()) driver->residency()->end_pass();
    for (auto* driver : drivers)
      if (driver->flats_.backward().how().reduces) driver->flats_.await_reductions();
    for (auto* driver : drivers)
      if (last) driver->flats_.end_step();
  } catch (const std::exception& error) {
    for (auto* driver : begun) driver->flats_.abandon(error.what());
    throw;
  }
  for (auto* driver : drivers)
    if (last) driver->scale_gradients();
}

}  // namespace bonfire
