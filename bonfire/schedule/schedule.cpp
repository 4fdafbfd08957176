#include "bonfire/schedule/schedule.h"

#include <algorithm>

namespace bonfire::schedule {

Contents contents(const Schedule& schedule) {
  Contents result;
  for (const auto& row : schedule.rows) {
    for (const Action& action : row) {
      result.backward |= makes_input_gradient(action.kind) || ends_activation(action.kind);
      result.messages |= is_message(action.kind);
      result.sharding |= is_sharding(action.kind);
      result.reductions |= action.kind == Kind::reduce;
      result.updates |= action.kind == Kind::update;
      result.ties |= action.kind == Kind::tie;
    }
  }
  return result;
}

Index::Index(const Schedule& schedule)
    : stages_(schedule.stages), microbatches_(schedule.microbatches), cells_(slot(static_cast<Kind>(kKinds), 0, 0)) {
  for (std::int32_t rank = 0; rank < schedule.ranks(); ++rank) {
    const auto& row = schedule.rows[static_cast<std::size_t>(rank)];
    for (std::int32_t at = 0; at < static_cast<std::int32_t>(row.size()); ++at) {
      const Action& action = row[static_cast<std::size_t>(at)];
      if (!has_microbatch(action.kind) || action.kind == Kind::tie) continue;
      Position& cell = cells_[slot(action.kind, action.stage, action.microbatch)];
      if (cell)
        repeated_.push_back({rank, at});
      else
        cell = {rank, at};
    }
  }
}

int Index::peer(const Action& message) const {
  const bool forward = message.kind == Kind::send_forward || message.kind == Kind::receive_forward;
  const int stage = message.stage + (is_send(message.kind) == forward ? 1 : -1);
  return (forward ? find(Kind::forward, stage, message.microbatch) : input_gradient(stage, message.microbatch)).rank;
}

std::vector<int> peak_activations(const Schedule& schedule) {
  const bool kept = contents(schedule).backward;
  std::vector<int> peaks;
  for (const auto& row : schedule.rows) {
    int live = 0, peak = 0;
    for (const Action& action : row) {
      if (action.kind == Kind::forward && kept) peak = std::max(peak, ++live);
      if (ends_activation(action.kind)) --live;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace bonfire::schedule
