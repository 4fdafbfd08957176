#include "bonfire/plan/unit_window.h"

#include <algorithm>
#include <utility>

namespace bonfire::plan {

UnitWindow::UnitWindow(std::vector<StepUnit> units, const std::vector<bool>& backwards, const DataParallel& layout,
                       Events events)
    : units_(std::move(units)),
      prefetch_(static_cast<std::size_t>(layout.prefetch)),
      ahead_in_backward_(layout.backward_prefetch == BackwardPrefetch::before_reduction),
      events_(std::move(events)),
      states_(units_.size()) {
  for (std::size_t at = 0; at < units_.size(); ++at)
    if (units_[at].root && units_[at].flat) root_ = at;
  if (root_) gathers_.push_back({*root_, static_cast<int>(backwards.size())});
  for (const bool backward : backwards)
    for (const std::size_t unit : used_by(backward)) {
      if (gathers_.empty() || gathers_.back().unit != unit) gathers_.push_back({unit, 0});
      ++gathers_.back().uses;
    }
}

std::vector<std::size_t> UnitWindow::used_by(bool backward) const {
  std::vector<std::size_t> used;
  for (std::size_t at = 0; at < units_.size(); ++at)
    if (units_[at].flat && !units_[at].root && (!backward || units_[at].backward)) used.push_back(at);
  if (backward) std::reverse(used.begin(), used.end());
  return used;
}

void UnitWindow::begin(bool knows_order) {
  follows_ = knows_order;
  current_ = next_ = 0;
}

void UnitWindow::run(bool backward) {
  const bool ahead = !backward || ahead_in_backward_;
  if (root_) enter(*root_, ahead);
  for (const std::size_t unit : used_by(backward)) {
    enter(unit, ahead);
    leave(unit);
    if (!ahead) look_ahead();
  }
  if (root_) leave(*root_);
}

void UnitWindow::enter(std::size_t unit, bool ahead) {
  auto& at = states_[unit];
  if (!follows_) {
    at = {.in = true, .left = 1};
    return events_.gather(*units_[unit].flat, -1);
  }
  while (!at.in) issue();
  current_ = std::max(current_, at.entry);
  if (ahead) look_ahead();
}

void UnitWindow::look_ahead() {
  if (!follows_) return;
  while (next_ < gathers_.size() && next_ <= current_ + prefetch_ && !states_[gathers_[next_].unit].in) issue();
}

void UnitWindow::leave(std::size_t unit) {
  auto& at = states_[unit];
  if (--at.left > 0) return;
  at.in = false;
  events_.let_go(*units_[unit].flat);
}

void UnitWindow::issue() {
  const auto& gather = gathers_[next_];
  states_[gather.unit] = {.in = true, .entry = next_, .left = gather.uses};
  events_.gather(*units_[gather.unit].flat, static_cast<std::int64_t>(next_));
  ++next_;
}

}  // namespace bonfire::plan
