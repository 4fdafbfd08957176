#include "bonfire/server/ledger.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

Ledger::Ledger(const Rules& rules, std::int64_t version)
    : rules_(rules), version_(version), workers_(static_cast<std::size_t>(rules.workers)) {}

bool Ledger::late(const Push& push) const {
  if (rules_.mode != ServerMode::synchronous) return false;
  return push.mixed ||
         std::any_of(push.versions.begin(), push.versions.end(), [&](auto version) { return version != version_; });
}

// What became of the worker's gradients is known.
void Ledger::settle(int worker, std::int64_t step, bool used) {
  auto& of = at(worker);
  of.waiting.reset();
  of.claimed = false;
  of.outcome = Outcome{version_, used};
  of.steps = step;
}

void Ledger::add(Push push) {
  const int worker = push.worker;
  auto& of = at(worker);
  require(!of.waiting, "worker {} has sent gradients of step {} while those of step {} wait", worker, push.step,
          of.waiting ? of.waiting->step : 0);
  of.outcome.reset();
  if (push.step <= of.last_used) return settle(worker, of.steps, true);
  if (late(push)) {
    dropped_.push_back(push);
    return settle(worker, push.step, false);
  }
  of.waiting = std::move(push);
  arrived_.push_back(worker);
}

int Ledger::actives() const {
  return static_cast<int>(
      std::count_if(workers_.begin(), workers_.end(), [](const Worker& worker) { return worker.state != State::gone; }));
}

std::optional<std::vector<int>> Ledger::next() const {
  if (arrived_.empty()) return std::nullopt;
  if (rules_.mode != ServerMode::synchronous) return std::vector<int>{arrived_.front()};
  const auto needed = static_cast<std::size_t>(std::max(1, std::min(actives(), rules_.workers - rules_.backup)));
  if (arrived_.size() < needed) return std::nullopt;
  std::vector<int> first(arrived_.begin(), arrived_.begin() + static_cast<std::ptrdiff_t>(needed));
  std::sort(first.begin(), first.end());
  return first;
}

bool Ledger::has(int worker) const { return at(worker).waiting.has_value(); }

bool Ledger::claim(int worker) { return at(worker).claimed = has(worker); }

void Ledger::release() {
  for (int worker = 0; worker < rules_.workers; ++worker)
    if (std::exchange(at(worker).claimed, false) && !present(worker)) forget(worker);
}

std::vector<Push> Ledger::commit(const std::vector<int>& workers) {
  std::vector<Push> taken;
  ++version_;
  for (const int worker : workers) {
    require(has(worker), "an update of gradients of worker {}, which has sent none", worker);
    const auto& push = taken.emplace_back(*at(worker).waiting);
    at(worker).last_used = push.step;
    at(worker).last_update = version_;
    std::erase(arrived_, worker);
    settle(worker, push.step, true);
  }
  for (const int worker : std::vector<int>(arrived_)) {
    if (!late(*at(worker).waiting)) continue;
    const auto& push = dropped_.emplace_back(*at(worker).waiting);
    std::erase(arrived_, worker);
    settle(worker, push.step, false);
  }
  return taken;
}

std::optional<Ledger::Outcome> Ledger::outcome(int worker) const { return at(worker).outcome; }

std::int64_t Ledger::lead(int worker) const {
  auto slowest = std::numeric_limits<std::int64_t>::max();
  for (const auto& other : workers_)
    if (other.state != State::gone) slowest = std::min(slowest, other.steps);
  return at(worker).steps - std::min(slowest, at(worker).steps);
}

bool Ledger::may_go_on(int worker) const { return rules_.mode != ServerMode::bounded || lead(worker) <= rules_.staleness; }

void Ledger::leave(int worker) { at(worker).state = State::gone; }

void Ledger::lose(int worker, bool returns) {
  auto& of = at(worker);
  of.state = returns ? State::awaited : State::gone;
  of.outcome.reset();
  if (!of.claimed) forget(worker);
}

void Ledger::forget(int worker) {
  std::erase(arrived_, worker);
  at(worker).waiting.reset();
}

void Ledger::come_back(int worker) { at(worker).state = State::present; }

}  // namespace bonfire
