#include "bonfire/schedule/clock.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire::schedule {

Resource Clock::resource(std::string name) {
  names_.push_back(std::move(name));
  last_.push_back(kNone);
  busy_.push_back(0);
  return {static_cast<std::uint32_t>(names_.size() - 1)};
}

Task Clock::task(Resource resource, double seconds, std::span<const Task> after) {
  require(resource.index < names_.size(), "clock: resource {} of {}", resource.index, names_.size());
  require(std::isfinite(seconds) && seconds >= 0, "clock: a task on '{}' of {} seconds; allowed: finite and not negative",
          names_[resource.index], seconds);
  const auto index = static_cast<std::uint32_t>(seconds_.size());
  const std::uint32_t previous = std::exchange(last_[resource.index], index);
  if (previous != kNone) next_[previous] = index;
  seconds_.push_back(seconds);
  resource_.push_back(resource.index);
  previous_.push_back(previous);
  next_.push_back(kNone);
  start_.push_back(0);
  for (const Task earlier : after) wait({index}, earlier);
  return {index};
}

void Clock::wait(Task task, Task earlier) {
  require(task.index < tasks() && earlier.index < tasks(), "clock: task {} waits for task {} of {}", task.index,
          earlier.index, tasks());
  dependencies_.push_back({earlier.index, task.index});
}

void Clock::reserve(std::size_t tasks, std::size_t dependencies) {
  seconds_.reserve(tasks);
  resource_.reserve(tasks);
  previous_.reserve(tasks);
  next_.reserve(tasks);
  start_.reserve(tasks);
  dependencies_.reserve(dependencies);
}

Clock::Successors Clock::successors() const {
  Successors result{std::vector<std::uint32_t>(tasks() + 1), std::vector<std::uint32_t>(dependencies_.size())};
  auto& first = result.first;
  for (const auto& dependency : dependencies_) ++first[dependency.earlier + 1];
  for (std::size_t i = 0; i < tasks(); ++i) first[i + 1] += first[i];
  auto free = first;
  for (const auto& dependency : dependencies_) result.later[free[dependency.earlier]++] = dependency.later;
  return result;
}

Clock::Order Clock::order() const {
  Order result{successors(), {}, std::vector<std::uint32_t>(tasks())};
  auto& sorted = result.sorted;
  auto& waiting = result.waiting;
  const auto& [first, later] = result.successors;
  for (std::size_t i = 0; i < tasks(); ++i) waiting[i] = previous_[i] == kNone ? 0 : 1;
  for (const auto& dependency : dependencies_) ++waiting[dependency.later];
  sorted.reserve(tasks());
  for (std::uint32_t i = 0; i < tasks(); ++i) {
    if (waiting[i] == 0) sorted.push_back(i);
  }
  const auto ended = [&](std::uint32_t task) {
    if (--waiting[task] == 0) sorted.push_back(task);
  };
  for (std::size_t at = 0; at < sorted.size(); ++at) {
    const std::uint32_t task = sorted[at];
    if (next_[task] != kNone) ended(next_[task]);
    for (std::uint32_t i = first[task]; i < first[task + 1]; ++i) ended(later[i]);
  }
  return result;
}

void Clock::run() {
  const auto [successors, sorted, waiting] = order();
  if (sorted.size() < tasks()) {
    std::string chain;
    const auto stuck = cycle();
    for (const Task task : stuck) chain += fmt::format("task {} on '{}' waits for ", task.index, name(resource_of(task)));
    fail("clock: tasks wait for each other: {}task {}", chain, stuck.front().index);
  }
  std::fill(start_.begin(), start_.end(), 0.0);
  std::fill(busy_.begin(), busy_.end(), 0.0);
  makespan_ = 0;
  for (const std::uint32_t task : sorted) {
    const double end = start_[task] + seconds_[task];
    busy_[resource_[task]] += seconds_[task];
    makespan_ = std::max(makespan_, end);
    if (next_[task] != kNone) start_[next_[task]] = std::max(start_[next_[task]], end);
    for (std::uint32_t i = successors.first[task]; i < successors.first[task + 1]; ++i) {
      double& start = start_[successors.later[i]];
      start = std::max(start, end);
    }
  }
}

std::vector<Task> Clock::cycle() const {
  const auto [successors, sorted, waiting] = order();
  if (sorted.size() == tasks()) return {};

  // Every task that still waits has a predecessor that still waits: walk back until a task comes up again.
  std::vector<std::uint32_t> blocker(tasks(), kNone);
  for (std::uint32_t i = 0; i < tasks(); ++i) {
    if (waiting[i] > 0 && previous_[i] != kNone && waiting[previous_[i]] > 0) blocker[i] = previous_[i];
  }
  // A dependency says more than the order of a resource, so it wins.
  for (const auto& dependency : dependencies_) {
    if (waiting[dependency.later] > 0 && waiting[dependency.earlier] > 0) blocker[dependency.later] = dependency.earlier;
  }
  auto task = static_cast<std::uint32_t>(
      std::find_if(waiting.begin(), waiting.end(), [](std::uint32_t count) { return count > 0; }) - waiting.begin());
  std::vector<bool> seen(tasks());
  while (!seen[task]) {
    seen[task] = true;
    task = blocker[task];
  }
  std::vector<Task> result;
  const std::uint32_t begin = task;
  do {
    result.push_back({task});
    task = blocker[task];
  } while (task != begin);
  return result;
}

}  // namespace bonfire::schedule
