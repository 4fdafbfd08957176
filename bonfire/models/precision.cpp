#include "bonfire/models/precision.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "bonfire/models/model.h"
#include "bonfire/nn/layers.h"

namespace bonfire {

namespace {

template <class Body>
void for_each_product_of_blocks(Model& model, const Body& body) {
  const auto& units = model.description().units;
  std::size_t at = 0;
  for (const auto& layer : model.layers()) {
    while (at < units.size() && units[at].kind == plan::UnitKind::root) ++at;
    if (units[at++].kind != plan::UnitKind::block) continue;
    for (const auto& module : layer->modules())
      if (auto* linear = dynamic_cast<nn::LinearImpl*>(module.get())) body(*linear);
  }
}

}  // namespace

void use_fp8(Model& model, const Fp8Recipe& recipe) {
  for_each_product_of_blocks(model, [&](nn::LinearImpl& linear) { linear.set_fp8(std::make_shared<Fp8Product>(recipe)); });
}

CapturedCalls::CapturedCalls(Model& model, at::Device device) {
  for_each_product_of_blocks(model, [&](nn::LinearImpl& linear) {
    if (linear.fp8()) products_.push_back(linear.fp8());
  });
  if (products_.empty()) return;
  later_ = at::zeros({static_cast<std::int64_t>(products_.size()), Fp8Product::roles},
                     at::TensorOptions(at::kLong).device(device));
  each_ = later_.clone();
  for (std::size_t at = 0; at < products_.size(); ++at) {
    products_[at]->set_later(later_.select(0, static_cast<std::int64_t>(at)));
    before_.push_back(products_[at]->calls());
  }
}

void CapturedCalls::issue() {
  if (later_.defined()) later_.add_(each_);
}

void CapturedCalls::captured() {
  if (products_.empty()) return;
  auto calls = at::empty(each_.sizes(), at::kLong);
  auto* next = calls.data_ptr<std::int64_t>();
  for (std::size_t at = 0; at < products_.size(); ++at) {
    for (std::size_t role = 0; role < before_[at].size(); ++role) *next++ = products_[at]->calls()[role] - before_[at][role];
    // None of them has been made.
    products_[at]->set_calls(before_[at]);
  }
  each_.copy_(calls);
}

void CapturedCalls::failed() {
  for (std::size_t at = 0; at < products_.size(); ++at) {
    products_[at]->set_calls(before_[at]);
    products_[at]->set_later({});
  }
}

void keep_for_backward(Model& model, plan::Kept kept) {
  for_each_product_of_blocks(model, [&](nn::LinearImpl& linear) {
    linear.set_keep_norm(kept == plan::Kept::all);
    linear.set_keep_activation(kept != plan::Kept::least);
  });
}

}  // namespace bonfire
