#include "bonfire/comm/held_ranks.h"

#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/stall.h"

namespace bonfire {

HeldRanks::HeldRanks(Options options)
    : options_(std::move(options)), errands_({.store = options_.store, .failed = [this](const Error& error) {
                                                if (!std::exchange(warned_, true))
                                                  options_.log.warning(
                                                      "the other ranks cannot be told which ranks are held: {}; it is "
                                                      "tried again",
                                                      error.what());
                                                return true;
                                              }}) {}

void HeldRanks::hold(int rank, const std::string& holder) {
  const auto known = held_.find(rank);
  if ((known == held_.end() ? "" : known->second.holder) == holder) return;
  Hold& hold = held_[rank];
  if (!holder.empty()) ++hold.number;
  hold.holder = holder;
  errands_.run([this, rank, hold](StoreClient& store) {
    // In this order: whoever sees the first looks at the others.
    store.set(prefix() + kAnyHeld, "yes");
    store.set(prefix() + held_key(rank), hold_text(hold.number, hold.holder));
    warned_ = false;
    if (hold.holder.empty())
      options_.log.info("rank {} goes on", rank);
    else
      options_.log.info("rank {} is held by {}: the others wait for it", rank, hold.holder);
  });
}

void HeldRanks::lost(int rank, int times) {
  errands_.run([this, rank, times](StoreClient& store) {
    store.set(prefix() + lost_key(rank), lost_text(times, false));
    store.set(prefix() + kAnyLost, "yes");
  });
}

void HeldRanks::lost_for_good(int rank, int times, int size) {
  errands_.run([this, rank, times, size](StoreClient& store) {
    store.set(prefix() + lost_key(rank), lost_text(times, true));
    store.set(prefix() + kAnyLost, "yes");
    check_out_lost(store, prefix(), rank, size);
  });
}

}  // namespace bonfire
