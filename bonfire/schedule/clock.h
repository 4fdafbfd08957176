#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire::schedule {

// Handles of one Clock, valid for that Clock only.
struct Resource {
  std::uint32_t index = 0;
  auto operator<=>(const Resource&) const = default;
};
struct Task {
  std::uint32_t index = 0;
  auto operator<=>(const Task&) const = default;
};

// When everything happens. A resource (a stream, a link) runs its tasks one at a time, in the order they were issued to it;
// a task starts as soon as its resource is free and all that it waits for has ended. There is no choice and so no
// randomness: the times are the longest paths, found in time linear in tasks and dependencies.
//
//   Clock clock;
//   const Resource compute = clock.resource("compute"), wire = clock.resource("wire");
//   const Task forward = clock.task(compute, 1.0);
//   const Task gather = clock.task(wire, 0.5, {forward});  // issued when the forward ends
//   clock.task(compute, 1.0, {gather});
//   clock.run();
//   clock.start(gather), clock.makespan(), clock.idle(compute)
//
// A task that must start after the start of another waits for what that other waits for, or for a task of zero seconds.
class BONFIRE_API Clock {
 public:
  Resource resource(std::string name);

  // Issues a task to the resource. REQUIRES: seconds >= 0 and finite; `after` holds tasks of this clock.
  Task task(Resource resource, double seconds, std::span<const Task> after);
  Task task(Resource resource, double seconds, std::initializer_list<Task> after = {}) {
    return task(resource, seconds, std::span<const Task>(after.begin(), after.size()));
  }

  // `task` also waits for `earlier`, which may have been issued later than it.
  void wait(Task task, Task earlier);

  void reserve(std::size_t tasks, std::size_t dependencies);

  // Computes all times. Throws Error, naming them, when tasks wait for each other. May be called again after more was
  // issued.
  void run();

  // Tasks that wait for each other, each for the next and the last for the first; empty when every task can run.
  // Each waits for the next through a dependency or because the next is before it in its resource's order.
  std::vector<Task> cycle() const;

  // Of the last run().
  double start(Task task) const { return start_[task.index]; }
  double end(Task task) const { return start_[task.index] + seconds_[task.index]; }
  double makespan() const { return makespan_; }                           // when the last task ends; the first starts at 0
  double busy(Resource resource) const { return busy_[resource.index]; }  // the sum of its tasks
  double idle(Resource resource) const { return makespan_ - busy(resource); }  // between 0 and the makespan

  std::size_t tasks() const { return seconds_.size(); }
  std::size_t resources() const { return names_.size(); }
  const std::string& name(Resource resource) const { return names_[resource.index]; }
  Resource resource_of(Task task) const { return {resource_[task.index]}; }
  double seconds(Task task) const { return seconds_[task.index]; }

 private:
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
  struct Dependency {
    std::uint32_t earlier, later;
  };
  // Who waits for each task: those of task t are later[first[t]] up to later[first[t + 1]].
  struct Successors {
    std::vector<std::uint32_t> first, later;
  };
  Successors successors() const;
  struct Order {
    Successors successors;
    std::vector<std::uint32_t> sorted;   // tasks, each after all that it waits for; without those in or behind a cycle
    std::vector<std::uint32_t> waiting;  // per task: for how many it still waits
  };
  Order order() const;

  std::vector<std::string> names_;   // per resource
  std::vector<std::uint32_t> last_;  // per resource: the task issued last
  std::vector<double> busy_;         // per resource
  std::vector<double> seconds_;      // per task, and so are the next four
  std::vector<std::uint32_t> resource_;
  std::vector<std::uint32_t> previous_;  // in the order of its resource
  std::vector<std::uint32_t> next_;
  std::vector<double> start_;
  std::vector<Dependency> dependencies_;
  double makespan_ = 0;
};

}  // namespace bonfire::schedule
