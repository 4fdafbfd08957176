#include "bonfire/pipeline/pipedream_row.h"

#include <algorithm>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/schedule/lowering.h"

namespace bonfire {

using schedule::Action;
using schedule::Kind;

namespace {

bool computes(const Action& action) { return action.kind == Kind::forward || action.kind == Kind::backward; }

// The receive that a computation reads.
std::pair<Kind, int> read_by(const Action& action) {
  return {action.kind == Kind::forward ? Kind::receive_forward : Kind::receive_backward, action.microbatch};
}

}  // namespace

PipeDreamRow::PipeDreamRow(schedule::RoundRobin robin, int rank, int receive_ahead)
    : robin_(std::move(robin)),
      rank_(rank),
      lowering_{.receive_ahead = receive_ahead, .reductions = true},
      endless_(schedule::endless(robin_, lowering_)) {
  // The rank before has had a gradient back before it sends the forward that follows in its row; that comes here within a
  // round of all replicas.
  int full = 0;
  for (int stage = 0; stage < static_cast<int>(robin_.replicas.size()); ++stage)
    full = std::max(full, schedule::in_flight(robin_, stage) * robin_.replicas[static_cast<std::size_t>(stage)]);
  const auto own = static_cast<std::size_t>(rank_);
  in_prologue_ = std::count_if(endless_.prologue.rows[own].begin(), endless_.prologue.rows[own].end(), computes);
  in_period_ = std::count_if(endless_.period.rows[own].begin(), endless_.period.rows[own].end(), computes);
  const bool by_minibatch = robin_.mode == schedule::WeightMode::stashing || robin_.mode == schedule::WeightMode::vertical;
  window_ = by_minibatch ? (full + 2 * robin_.round()) * robin_.microbatches : full + 2 * robin_.microbatches;
}

std::vector<Action> PipeDreamRow::row_of(int minibatches) {
  dropped_ = 0;
  if (minibatches >= endless_.least_minibatches) {
    schedule::Periods periods{.count = 1 + (minibatches - endless_.least_minibatches) / endless_.period_minibatches};
    // No receive that was put off lies further behind than a window.
    const int kept = 2 + window_ / endless_.microbatches;
    const std::int64_t passed = (computed_ - in_prologue_) / in_period_ - kept;
    periods.skipped = static_cast<int>(std::clamp<std::int64_t>(passed, 0, periods.count));
    if (periods.skipped > 0) dropped_ = in_prologue_ + periods.skipped * in_period_;
    return schedule::unrolled_row(endless_, rank_, periods);
  }
  auto robin = robin_;
  robin.minibatches = minibatches;
  return schedule::lower(schedule::pipedream(robin), lowering_).rows[static_cast<std::size_t>(rank_)];
}

// Continues in the row of so many minibatches.
void PipeDreamRow::take(int minibatches) {
  row_ = Executor::prepared(row_of(minibatches), [&](const Action& message) {
    const bool forward = message.kind == Kind::send_forward || message.kind == Kind::receive_forward;
    const int stage = message.stage + (schedule::is_send(message.kind) == forward ? 1 : -1);
    return robin_.rank_of(stage, message.microbatch);
  });
  horizon_ = minibatches;
  // As many computations as before, and what was sent of the last one.
  next_ = 0;
  put_off_.clear();
  std::set<std::pair<Kind, int>> read;
  for (std::int64_t computed = dropped_; computed < computed_; ++next_)
    if (computes(row_[next_].action)) {
      ++computed;
      read.insert(read_by(row_[next_].action));
    }
  while (computed_ > 0 && next_ < row_.size() && schedule::is_send(row_[next_].action.kind)) ++next_;
  for (std::size_t at = 0; at < next_; ++at) {
    const auto& action = row_[at].action;
    const auto receive = std::pair(action.kind, static_cast<int>(action.microbatch));
    if (schedule::is_receive(action.kind) && !read.contains(receive) && !posted_.contains(receive))
      put_off_.push_back(row_[at]);
  }
}

// Behind the last forward of a microbatch below the limit, and its message.
std::size_t PipeDreamRow::end_of(int limit) const {
  std::size_t end = next_;
  for (std::size_t at = next_; at < row_.size(); ++at) {
    if (row_[at].action.kind != Kind::forward) continue;
    if (row_[at].action.microbatch >= limit) break;
    end = at + 1;
    while (end < row_.size() && schedule::is_send(row_[end].action.kind)) ++end;
  }
  return end;
}

std::vector<Executor::Cell> PipeDreamRow::hand_out(std::size_t end, int limit) {
  std::vector<Executor::Cell> cells, later;
  const auto receive = [&](const Executor::Cell& cell) {
    const auto key = std::pair(cell.action.kind, static_cast<int>(cell.action.microbatch));
    if (posted_.contains(key)) return;
    if (cell.action.microbatch >= limit) {
      later.push_back(cell);
      return;
    }
    posted_.insert(key);
    cells.push_back(cell);
  };
  for (const auto& cell : put_off_) receive(cell);
  for (; next_ < end; ++next_) {
    const auto& cell = row_[next_];
    if (schedule::is_receive(cell.action.kind)) {
      receive(cell);
      continue;
    }
    if (computes(cell.action)) {
      ++computed_;
      posted_.erase(read_by(cell.action));
    }
    cells.push_back(cell);
  }
  put_off_ = std::move(later);
  return cells;
}

std::vector<Executor::Cell> PipeDreamRow::admit(int minibatches) {
  if (minibatches > horizon_) {
    // Enough that a row is made once for many minibatches.
    const int round = robin_.round(), wanted = minibatches + 4 * endless_.least_minibatches;
    take((wanted + round - 1) / round * round);
  }
  const int limit = minibatches * robin_.microbatches;
  return hand_out(end_of(limit), limit);
}

std::vector<Executor::Cell> PipeDreamRow::drain(int minibatches) {
  take(minibatches);
  auto cells = hand_out(row_.size(), minibatches * robin_.microbatches);
  require(put_off_.empty(), "a drain leaves {} receives", put_off_.size());
  return cells;
}

void PipeDreamRow::restart() {
  horizon_ = 0;
  row_.clear();
  next_ = 0;
  computed_ = dropped_ = 0;
  posted_.clear();
  put_off_.clear();
}

std::size_t PipeDreamRow::place(const Action& action) const {
  const int period = std::max(1, window_);
  return static_cast<std::size_t>(action.microbatch < 0 ? 0 : action.microbatch % period) * 2 +
         (action.kind == Kind::receive_backward ? 1 : 0);
}

}  // namespace bonfire
