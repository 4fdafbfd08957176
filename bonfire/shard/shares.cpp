#include "bonfire/shard/shares.h"

#include <algorithm>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"
#include "bonfire/shard/number_slice.h"

namespace bonfire {

Shares::Shares() : self_(std::make_shared<Shares*>(this)) {}
Shares::~Shares() = default;
Shares::Shares(Shares&& other) noexcept : self_(std::move(other.self_)) {
  if (self_) *self_ = this;
}
Shares& Shares::operator=(Shares&& other) noexcept {
  self_ = std::move(other.self_);
  if (self_) *self_ = this;
  return *this;
}

int Shares::Division::copy(int of, int region_copy) const {
  const int own = of > 1 ? replicas.rank() : replicas.rank() * ranks.size() + ranks.rank();
  return region_copy * replicas.size() * ranks.size() + own;
}

int Shares::Division::copies(int of) const { return of > 1 ? replicas.size() : replicas.size() * ranks.size(); }

Shares& SharesRef::get() const {
  const auto self = self_.lock();
  require(self != nullptr, "the Engine or Pipeline of this optimizer is gone: it must live as long as the optimizer steps");
  return **self;
}

// --- An Engine's.

namespace {

// A group is known by the first of its parameters that no other stage has; where one has none, the order is not told.
void add_order(std::vector<Slice>& slices, const FlatGroup& flats, const Shares::Division& division,
               const std::shared_ptr<std::vector<std::int64_t>>& places) {
  const auto learned = flats.learned_places();
  places->assign(learned.size(), -1);
  std::vector<const plan::Placement*> known(learned.size());
  for (const auto& parameter : flats.layout().parameters()) {
    const auto& placement = flats.flats()[parameter.flat]->layout().segments[parameter.segment].placement;
    if (placement.tie.empty() && !known[parameter.group]) known[parameter.group] = &placement;
  }
  if (std::find(known.begin(), known.end(), nullptr) != known.end()) return;
  for (std::size_t group = 0; group < known.size(); ++group) {
    slices.push_back(slice_of({.kind = std::string(hint_prefix) + "order",
                               .get = [place = learned[group]] { return place; },
                               .set = [places, group](std::int64_t place) { (*places)[group] = place; }},
                              division, *known[group]));
  }
}

}  // namespace

std::vector<Shares::Part> Engine::parts() const {
  std::vector<Part> parts;
  for (const auto& flat : flats()) parts.push_back({.flat = flat.get()});
  return parts;
}

Shares::Division Engine::division() const {
  return {groups().shards, factors().optimizer, groups().replicas, 0, groups().splits.rank()};
}
at::Device Engine::device() const { return state_->flats.pool().device(); }
void Engine::sum(at::Tensor& numbers) const {
  groups().shards.all_reduce(numbers).wait();
  groups().splits.all_reduce(numbers).wait();
}

std::vector<Slice> Engine::slices() {
  // What was gathered is older than what may be written.
  state_->driver->meet();
  state_->driver->before_update();
  auto slices = parameter_slices(*this);
  for (const auto& [name, tensor] : state_->flats.buffers().all()) {
    // A buffer may lie in memory in any order.
    auto buffer = tensor;
    Slice slice;
    slice.name = name;
    slice.kind = "buffer";
    slice.dtype = buffer.scalar_type();
    slice.shape = buffer.sizes().vec();
    slice.box = whole_box(slice.shape);
    slice.length = buffer.numel();
    slice.copy = division().copy(1, division().split);
    slice.copies = division().copies(1);
    slice.get = [buffer](std::int64_t begin, const at::Tensor& values) { getter(buffer.reshape({-1}))(begin, values); };
    slice.set = [buffer](std::int64_t begin, const at::Tensor& values) {
      auto all = buffer.reshape({-1}).clone();
      setter(all)(begin, values);
      buffer.copy_(all.view(buffer.sizes()));
    };
    slices.push_back(std::move(slice));
  }
  state_->places = std::make_shared<std::vector<std::int64_t>>();
  add_order(slices, state_->flats, division(), state_->places);
  state_->carried.add_slices(slices, state_->flats, division());
  return slices;
}

void Engine::slices_written() {
  parameters_written(*this);
  if (state_->places) state_->flats.take_places(*std::exchange(state_->places, nullptr));
  state_->carried.apply(state_->flats);
}

}  // namespace bonfire
