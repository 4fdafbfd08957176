#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/nn/unit.h"

namespace bonfire {

// A module type that is not yours to mark, as a Unit: bonfire::UnitOf<torch::nn::TransformerEncoderLayerImpl> in place of
// torch::nn::TransformerEncoderLayer. Its forward must not be overloaded. Default arguments that it
// declares work as ever.
template <class Impl>
using UnitOf = torch::nn::ModuleHolder<Unit<Impl>>;

// torch's ModuleList for Units of one type (Holder: what BONFIRE_UNIT declared). Elements are holders, so that calling one
// passes its seam: `for (auto& block : *blocks) x = block->forward(x);`
template <class Holder>
class UnitListImpl : public torch::nn::Module {
 public:
  UnitListImpl() = default;
  UnitListImpl(std::initializer_list<Holder> units) {
    for (const auto& unit : units) push_back(unit);
  }

  // Its name is its number.
  void push_back(Holder unit) { units_.push_back(register_module(std::to_string(units_.size()), std::move(unit))); }
  std::size_t size() const { return units_.size(); }
  bool empty() const { return units_.empty(); }
  Holder& operator[](std::size_t at) { return units_.at(at); }
  auto begin() { return units_.begin(); }
  auto end() { return units_.end(); }

 private:
  std::vector<Holder> units_;
};

template <class Holder>
class UnitList : public torch::nn::ModuleHolder<UnitListImpl<Holder>> {
 public:
  using torch::nn::ModuleHolder<UnitListImpl<Holder>>::ModuleHolder;
  using Impl = UnitListImpl<Holder>;
  UnitList() = default;
  UnitList(std::initializer_list<Holder> units) : UnitList(std::make_shared<Impl>(units)) {}
};

}  // namespace bonfire
