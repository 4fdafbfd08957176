#include "bonfire/shard/flat_parameter.h"

#include <unordered_map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "bonfire/base/error.h"

namespace bonfire {

FlatParameter::FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters, at::ScalarType compute)
    : layout_(std::move(layout)), parameters_(std::move(parameters)), written_(parameters_.size()) {
  require(parameters_.size() == layout_.segments.size(), "a flat parameter of {} segments was given {} parameters",
          layout_.segments.size(), parameters_.size());
  const at::NoGradGuard no_grad;
  const auto own = parameters_.front().options().requires_grad(false);
  compute_ = at::zeros({layout_.total}, own.dtype(compute));
  master_ =
      compute == own.dtype().toScalarType() ? compute_.narrow(0, 0, layout_.trained) : at::zeros({layout_.trained}, own);
  gradient_ = at::zeros_like(master_);
  for (std::size_t at = 0; at < parameters_.size(); ++at) adopt(at, parameters_[at].detach());
}

FlatParameter::FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters,
                             std::span<const FlatParameter* const> before)
    : layout_(std::move(layout)), parameters_(std::move(parameters)), written_(parameters_.size()) {
  struct Place {
    const FlatParameter* flat;
    std::size_t segment;
  };
  std::unordered_map<std::string, Place> places;
  for (const auto* flat : before)
    for (std::size_t at = 0; at < flat->layout_.segments.size(); ++at) places[flat->layout_.segments[at].name] = {flat, at};

  const at::NoGradGuard no_grad;
  const FlatParameter& first = *places.at(layout_.segments.front().name).flat;
  compute_ = at::zeros({layout_.total}, first.compute_.options());
  master_ = first.low_precision().defined() ? at::zeros({layout_.trained}, first.master_.options())
                                            : compute_.narrow(0, 0, layout_.trained);
  gradient_ = at::zeros_like(master_);
  for (std::size_t at = 0; at < parameters_.size(); ++at) {
    const auto [flat, segment] = places.at(layout_.segments[at].name);
    const bool had_master = flat->layout_.segments[segment].trained;
    adopt(at, had_master ? flat->view(flat->master_, segment) : parameters_[at].detach());
    if (!layout_.segments[at].trained || !flat->written(segment)) continue;
    view(gradient_, at).copy_(flat->view(flat->gradient_, segment));
    written_[at] = true;
    parameters_[at].mutable_grad() = view(gradient_, at);
  }
  generation_ = first.generation_;
}

void FlatParameter::adopt(std::size_t segment, const at::Tensor& value) {
  const auto& place = layout_.segments[segment];
  auto home = compute_.narrow(0, place.offset, place.elements).view(parameters_[segment].sizes());
  home.copy_(value);
  if (place.trained && low_precision().defined()) view(master_, segment).copy_(value);
  parameters_[segment].set_data(home);
}

at::Tensor FlatParameter::low_precision() const {
  return master_.scalar_type() == compute_.scalar_type() ? at::Tensor() : compute_.narrow(0, 0, layout_.trained);
}

at::Tensor FlatParameter::view(const at::Tensor& flat, std::size_t segment) const {
  // Not a view in autograd's eyes: optimizers of torch's detach gradients in place, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView plain;
  const auto& place = layout_.segments[segment];
  return flat.narrow(0, place.offset, place.elements).view(parameters_[segment].sizes());
}

std::size_t FlatParameter::segment(const std::string& name) const {
  for (std::size_t at = 0; at < layout_.segments.size(); ++at)
    if (layout_.segments[at].name == name) return at;
  fail("no parameter '{}' in this flat parameter of {} segments", name, layout_.segments.size());
}

}  // namespace bonfire
