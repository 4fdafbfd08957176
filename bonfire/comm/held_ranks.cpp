#include "bonfire/comm/held_ranks.h"

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
    const std::string prefix = fmt::format("attempt {}/", options_.attempt);
    // In this order: whoever sees the first looks at the others.
    store.set(prefix + kAnyHeld, "yes");
    store.set(prefix + held_key(rank), hold_text(hold.number, hold.holder));
    warned_ = false;
    if (hold.holder.empty())
      options_.log.info("rank {} goes on", rank);
    else
      options_.log.info("rank {} is held by {}: the others wait for it", rank, hold.holder);
  });
}

}  // namespace bonfire
