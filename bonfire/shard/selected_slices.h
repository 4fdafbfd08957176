#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/shard/slices.h"

namespace bonfire {

// Some of what an engine, a pipeline or an optimizer has, for a checkpoint that leaves the rest out: frozen weights that are
// saved elsewhere. REQUIRES: `of` outlives it.
class SelectedSlices final : public Sliced {
 public:
  using Wanted = std::function<bool(const std::string& name, const std::string& kind)>;
  SelectedSlices(Sliced& of, Wanted wanted) : of_(of), wanted_(std::move(wanted)) {}

  std::vector<Slice> slices() override {
    auto all = of_.slices();
    std::erase_if(all, [this](const Slice& slice) { return !wanted_(slice.name, slice.kind); });
    return all;
  }
  void slices_written() override { of_.slices_written(); }

 private:
  Sliced& of_;
  Wanted wanted_;
};

}  // namespace bonfire
