#include "bonfire/plan/reductions.h"

#include <algorithm>
#include <utility>

#include "bonfire/plan/step_events.h"

namespace bonfire::plan {

void Reductions::open(std::size_t flat) {
  if (opened_[flat] || layout_.factors().gradients == 1) return;
  make_room();
  opened_[flat] = whole_.memory.borrow(flats_[flat].trained_elements() * bytes_of(layout_.reduction));
}

void Reductions::launch(std::size_t flat) {
  if (layout_.shard == 1 || !flats_[flat].any_trained()) return;
  make_room();
  Flight flight;
  if (layout_.factors().gradients > 1)
    flight.loan = std::exchange(opened_[flat], std::nullopt);
  else if (layout_.reduction != layout_.gradient)
    flight.loan = whole_.memory.borrow(flats_[flat].trained_elements() * bytes_of(layout_.reduction));
  for (const auto& region : flats_[flat].regions)
    if (arrivals_ && region.trained)
      flight.arrivals.push_back(
          arrivals_->take(region.elements / layout_.shard * (layout_.shard - 1) * bytes_of(layout_.reduction)));
  flights_.push_back(std::move(flight));
  whole_.flights.push_back(this);
}

void Reductions::make_room() {
  while (whole_.flights.size() >= static_cast<std::size_t>(whole_gradient_limit(layout_))) whole_.flights.front()->land();
}

void Reductions::land() {
  if (flights_.front().loan) whole_.memory.give_back(*flights_.front().loan);
  for (const auto buffer : flights_.front().arrivals) arrivals_->give_back(buffer);
  flights_.pop_front();
  whole_.flights.erase(std::find(whole_.flights.begin(), whole_.flights.end(), this));
}

void Reductions::land_all() {
  while (!flights_.empty()) land();
}

std::int64_t rounding_bytes(const FlatLayout& flat, const DataParallel& layout) {
  if (layout.compression != Compression::bf16 && layout.compression != Compression::fp16) return 0;
  std::int64_t most = 0;
  for (const auto& region : flat.regions)
    if (region.trained) most = std::max(most, region.elements / layout.shard * bytes_of(layout.gradient));
  return most;
}

}  // namespace bonfire::plan
