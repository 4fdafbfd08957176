#include "bonfire/comm/held_ranks.h"

#include "bonfire/comm/stall.h"

namespace bonfire {

void HeldRanks::hold(int rank, const std::string& holder) {
  const auto known = held_.find(rank);
  if ((known == held_.end() ? "" : known->second) == holder) return;
  held_[rank] = holder;
  try {
    if (!client_) client_.emplace(options_.store);
    const std::string key = fmt::format("attempt {}/{}", options_.attempt, held_key(rank));
    if (holder.empty())
      client_->remove(key);
    else
      client_->set(key, holder);
  } catch (const Error& error) {
    options_.log.warning("the other ranks cannot be told about rank {}: {}", rank, error.what());
    return;
  }
  if (holder.empty())
    options_.log.info("rank {} goes on", rank);
  else
    options_.log.info("rank {} is held by {}: the others wait for it", rank, holder);
}

}  // namespace bonfire
