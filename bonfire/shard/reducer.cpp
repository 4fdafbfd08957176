#include "bonfire/shard/reducer.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

namespace bonfire {

void Reducer::begin(Flats& flats, bool last, bool in_company) {
  flats_ = &flats;
  last_ = last;
  in_company_ = in_company || options_.in_company;
  must_wait_ = in_company || (options_.in_company && memory_->engines > 1);
  patient_ = true;
  launched_.assign(flats.size(), false);
}

void Reducer::open(FlatParameter& flat) {
  if (flat.gradients_open()) return;
  make_room();
  flat.open_gradients(pool_);
}

// The one that set out first makes room, whoever reduces it.
void Reducer::make_room() {
  const auto& flights = memory_->flights;
  while (flights.size() >= options_.whole_gradients && flights.front()->front_will_land()) flights.front()->land_front();
}

// Others may need something of this rank before they can reduce what it waits for: where ranks run Units in different
// orders, to wait for each other without end is what must not be.
bool Reducer::front_will_land() {
  if (must_wait_) return true;
  if (options_.must_go_on && options_.must_go_on()) patient_ = false;
  // There it is the stream that would wait, and with it all that the others need of this rank.
  if (!pool_.device().is_cpu()) return patient_;
  auto& front = flights_.front();
  if (patient_ && !front.landed) patient_ = front.work.wait_for(options_.patience);
  return front.landed || front.work.done();
}

void Reducer::launch(std::size_t bucket) {
  auto& flat = *(*flats_)[bucket];
  launched_[bucket] = true;
  if (!flat.layout().any_trained()) return;
  const at::NoGradGuard no_grad;
  open(flat);
  // Where gradients are kept whole, those on their way take memory of the backend's.
  make_room();
  for (std::size_t at = 0; at < flat.layout().segments.size(); ++at) {
    if (!flat.layout().trained(at) || flat.written(at)) continue;
    // Not used in this step: it contributes nothing to the average.
    flat.gradient_view(at).zero_();
    flat.set_written(at, true);
  }
  Flight flight{.bucket = bucket, .last = last_};
  std::vector<Transfer> transfers;
  // Sums of two-byte numbers could overflow where their average does not.
  const bool divide_first = options_.wire && c10::elementSize(*options_.wire) == 2;
  for (const auto& share : flat.trained()) {
    auto whole = on_wire(flight, flat.gradient(share.region));
    if (divide_first) whole.div_(options_.shard.size());
    transfers.push_back({whole, whole.narrow(0, share.share.begin, share.share.length)});
    flight.wholes.push_back(std::move(whole));
  }
  if (auto memory = flat.close_gradients()) flight.memory.push_back(std::move(memory));
  flight.work = options_.shard.reduce_scatter(transfers, divide_first ? Reduce::sum : Reduce::average);
  flights_.push_back(std::move(flight));
  memory_->flights.push_back(this);
  // Where streams wait for each other the rest is issued at once; a host looks again later.
  if (!pool_.device().is_cpu()) side_.run([&] { land(flights_.back()); });
  progress();
}

at::Tensor Reducer::on_wire(Flight& flight, const at::Tensor& whole) {
  if (!options_.wire || whole.scalar_type() == *options_.wire) return whole;
  const auto bytes = whole.numel() * static_cast<std::int64_t>(c10::elementSize(*options_.wire));
  flight.memory.push_back(pool_.borrow(bytes));
  auto rounded = flight.memory.back()->bytes(bytes).view(*options_.wire);
  rounded.copy_(whole);
  return rounded;
}

// Memory stays with its flight until another one needs it: how much of it there is must not depend on who is faster.
void Reducer::progress() {
  if (!pool_.device().is_cpu() || !options_.replicated) return;
  // Among one rank everything has arrived.
  if (in_company_ && options_.shard.size() > 1) return;
  for (auto& flight : flights_) {
    if (!flight.landed && !flight.work.done()) break;
    if (!flight.landed) land(flight);
  }
  while (!flights_.empty() && flights_.front().landed && flights_.front().memory.empty()) pop_front();
}

void Reducer::land(Flight& flight) {
  const at::NoGradGuard no_grad;
  auto& flat = *(*flats_)[flight.bucket];
  flight.work.wait();
  for (std::size_t at = 0; at < flight.wholes.size(); ++at) {
    const auto& share = flat.trained()[at];
    const auto mine = flight.wholes[at].narrow(0, share.share.begin, share.share.length);
    if (same_memory(mine, share.gradient)) continue;
    // What earlier microbatches left is in the share, where it is not kept whole until the last one.
    if (!flat.keeps_whole_gradients() && flat.share_written())
      share.gradient.add_(mine);
    else
      share.gradient.copy_(mine);
  }
  flat.set_share_written(true);
  for (const auto& memory : flight.memory) memory->finished();
  flight.wholes.clear();
  flight.landed = true;
  if (flight.last) replicas_->begin(flight.bucket, flat);
}

void Reducer::land_front() {
  if (!flights_.front().landed) land(flights_.front());
  pop_front();
}

void Reducer::pop_front() {
  auto& flights = memory_->flights;
  flights.erase(std::find(flights.begin(), flights.end(), this));
  flights_.pop_front();
}

void Reducer::land_all() {
  while (!flights_.empty()) land_front();
  side_.join();
}

void Reducer::end() {
  for (std::size_t at = 0; at < launched_.size(); ++at)
    if (!launched_[at]) launch(at);
  land_all();
  if (!last_) return;
  const at::NoGradGuard no_grad;
  for (const auto stage : {&Reduction::advance, &Reduction::end})
    for (std::size_t at = 0; at < flats_->size(); ++at)
      if ((*flats_)[at]->layout().any_trained()) ((*replicas_).*stage)(at, *(*flats_)[at]);
}

void Reducer::forget() {
  flights_.clear();
  std::erase(memory_->flights, this);
  replicas_->reset();
  if (flats_)
    for (auto& flat : *flats_) flat->close_gradients();
}

void Reducer::abandon() {
  if (!flats_) return;
  land_all();
  for (const auto stage : {&Reduction::advance, &Reduction::end})
    for (std::size_t at = 0; at < flats_->size(); ++at)
      if (last_ && launched_[at] && (*flats_)[at]->layout().any_trained()) ((*replicas_).*stage)(at, *(*flats_)[at]);
  for (auto& flat : *flats_) flat->close_gradients();
}

}  // namespace bonfire
