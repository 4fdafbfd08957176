#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bonfire/comm/group.h"
#include "bonfire/plan/layout.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/shares.h"

namespace bonfire {

// What a server updates: of every Unit's buffer the share that is its own, as if the servers were ranks that a model is
// sharded over.
class ServedShares final : public Shares {
 public:
  // `units` in forward order, which is that of the updates.
  ServedShares(const std::vector<plan::ParameterGroup>& units, Group servers);

  FlatParameter& unit(std::size_t at) { return *units_[at]; }
  std::size_t units() const { return units_.size(); }
  // Called when a Unit has new values, while the next is being updated.
  std::function<void(std::size_t unit)> on_updated{};

  // Called with the squares of all gradients, summed, where an update asks for them.
  std::function<void(double squares)> on_sum{};

  std::vector<Part> parts() const override;
  std::int64_t layout_version() const override { return 0; }
  Division division() const override { return {.ranks = servers_, .factor = servers_.size()}; }
  at::Device device() const override { return at::kCPU; }
  void sum(at::Tensor& numbers) const override;
  void require_gradients() const override {}
  void spend_gradients(const GradientUse&) override {}
  void updated(std::size_t part) override {
    if (on_updated) on_updated(part);
  }
  void finish_update() override {}

 private:
  Group servers_;
  std::vector<std::unique_ptr<FlatParameter>> units_;
};

}  // namespace bonfire
