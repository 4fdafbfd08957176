#include "bonfire/shard/carried_state.h"

#include <tuple>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "bonfire/kernels/fp8.h"

namespace bonfire {
namespace {

// Copies of a tied weight, on other stages, carry what is their own.
std::string kind_of(const std::string& name, const plan::Placement& placement) {
  const std::string copy = placement.copy > 0 ? fmt::format(".{}", placement.copy) : "";
  return hint_prefix + name + copy;
}

const plan::Placement& placement_of(const FlatGroup& flats, const LaidParameter& parameter) {
  return flats.flats()[parameter.flat]->layout().segments[parameter.segment].placement;
}

template <class Body>
void for_each_product(const FlatGroup& flats, const Body& body) {
  for (const auto& parameter : flats.layout().parameters())
    for (std::size_t at = 0; at < parameter.products.size(); ++at)
      body(placement_of(flats, parameter), at == 0 ? "fp8" : fmt::format("fp8_{}", at), parameter, *parameter.products[at]);
}

template <class Body>
void for_each_carried(const FlatGroup& flats, const Body& body) {
  if (!flats.settings().replicated()) return;
  for (std::size_t at = 0; at < flats.flats().size(); ++at) {
    const auto& flat = *flats.flats()[at];
    for (const auto& carried : flats.reduction().carried(at, flat))
      body(flat.layout().segments[carried.segment].placement, carried);
  }
}

void make_of_each_rank(Slice& slice, int rank, int ranks) {
  slice.shape.insert(slice.shape.begin(), ranks);
  slice.box.begin.insert(slice.box.begin.begin(), rank);
  slice.box.end.insert(slice.box.end.begin(), rank + 1);
  slice.copy = 0;
  slice.copies = 1;
}

}  // namespace

Slice CarriedState::slice(Key key, const at::Tensor& values) {
  Slice slice;
  std::tie(slice.name, slice.kind) = key;
  slice.dtype = values.scalar_type();
  slice.shape = values.sizes().vec();
  slice.box = whole_box(slice.shape);
  slice.length = values.numel();
  slice.get = getter(values.reshape({-1}));
  slice.set = [written = written_, key = std::move(key), like = values](std::int64_t at, const at::Tensor& part) {
    auto& own = (*written)[key];
    if (!own.values.defined()) own.values = like.reshape({-1}).clone();
    own.values.narrow(0, at, part.numel()).copy_(part);
    own.any = true;
  };
  return slice;
}

void CarriedState::add_slices(std::vector<Slice>& slices, const FlatGroup& flats, const Shares::Division& division) {
  written_->clear();
  for_each_product(flats, [&](const plan::Placement& placement, const std::string& name, const LaidParameter&,
                              const Fp8Product& product) {
    auto own = slice({placement.name, kind_of(name, placement)}, product.memory());
    // Magnitudes are not a sum: other ranks measure their own anew.
    make_of_each_rank(own, division.copy(1, 0), division.copies(1));
    slices.push_back(std::move(own));
  });
  for_each_carried(flats, [&](const plan::Placement& placement, const Reduction::Carried& carried) {
    auto own = slice({placement.name, kind_of(carried.name, placement)}, carried.values);
    own.copy = division.copy(1, 0);
    own.copies = division.copies(1);
    own.of_each_rank = carried.of_each_rank;
    if (carried.of_each_rank) make_of_each_rank(own, division.copy(1, 0), division.copies(1));
    slices.push_back(std::move(own));
  });
}

void CarriedState::apply(FlatGroup& flats) {
  const at::NoGradGuard no_grad;
  const auto written = std::exchange(written_, std::make_shared<std::map<Key, Written>>());
  const auto values_of = [&](const std::string& name, const std::string& kind) {
    const auto at = written->find({name, kind});
    return at != written->end() && at->second.any ? at->second.values : at::Tensor();
  };
  for_each_product(flats, [&](const plan::Placement& placement, const std::string& name, const LaidParameter& parameter,
                              Fp8Product& product) {
    const auto values = values_of(placement.name, kind_of(name, placement));
    if (values.defined())
      product.set_memory(values.view({Fp8Product::roles, Fp8Product::remembered}), parameter.tensor.device());
  });
  for_each_carried(flats, [&](const plan::Placement& placement, const Reduction::Carried& carried) {
    const auto values = values_of(placement.name, kind_of(carried.name, placement));
    auto home = carried.values;
    if (values.defined() && values.numel() == home.numel()) home.copy_(values.view(home.sizes()));
  });
}

}  // namespace bonfire
