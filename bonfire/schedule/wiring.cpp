#include "bonfire/schedule/wiring.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include <fmt/format.h>

namespace bonfire::schedule {
namespace {

class Wirer {
 public:
  Wirer(const Schedule& schedule, const Index& index, const Costs& costs)
      : schedule_(schedule), index_(index), costs_(costs), messages_(contents(schedule).messages) {}

  Wiring wire() {
    issue_cells();
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      gathered_.assign(static_cast<std::size_t>(schedule_.stages), kNone);
      reduced_.assign(static_cast<std::size_t>(schedule_.stages), kNone);
      tied_.clear();
      issued_.clear();
      const auto& row = schedule_.rows[static_cast<std::size_t>(rank)];
      for (std::int32_t at = 0; at < static_cast<std::int32_t>(row.size()); ++at) connect({rank, at});
    }
    return std::move(wiring_);
  }

 private:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  void issue_cells() {
    std::size_t cells = 0;
    for (const auto& row : schedule_.rows) cells += row.size();
    wiring_.clock.reserve(cells + cells / 2, 3 * cells);
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      const Resource resource = wiring_.clock.resource(fmt::format("rank {}", rank));
      wiring_.ranks.push_back(resource);
      wiring_.first.push_back(static_cast<std::uint32_t>(wiring_.clock.tasks()));
      for (const Action& action : schedule_.rows[static_cast<std::size_t>(rank)]) {
        wiring_.clock.task(resource, is_compute(action.kind) ? costs_.action(action) : 0.0);
      }
    }
    std::vector<std::int32_t> holders(static_cast<std::size_t>(schedule_.stages), -1);
    shared_.assign(static_cast<std::size_t>(schedule_.stages), false);
    for (std::int32_t rank = 0; rank < schedule_.ranks(); ++rank) {
      for (const Action& action : schedule_.rows[static_cast<std::size_t>(rank)]) {
        auto& holder = holders[static_cast<std::size_t>(action.stage)];
        if (holder >= 0 && holder != rank) shared_[static_cast<std::size_t>(action.stage)] = true;
        holder = rank;
      }
    }
  }

  void connect(Position cell) {
    const Action& action = schedule_.at(cell);
    const auto stage = static_cast<std::size_t>(action.stage);
    switch (action.kind) {
      case Kind::forward:
        after_gather(cell);
        if (action.stage > 0) after(cell, index_.find(Kind::forward, action.stage - 1, action.microbatch));
        if (!messages_ && action.stage + 1 < schedule_.stages)
          send(cell, index_.find(Kind::forward, action.stage + 1, action.microbatch), Kind::send_forward);
        break;
      case Kind::backward:
      case Kind::input_gradient:
        after_gather(cell);
        after(cell, index_.find(Kind::forward, action.stage, action.microbatch));
        if (action.stage + 1 < schedule_.stages) after(cell, index_.input_gradient(action.stage + 1, action.microbatch));
        if (!messages_ && action.stage > 0)
          send(cell, index_.input_gradient(action.stage - 1, action.microbatch), Kind::send_backward);
        break;
      case Kind::weight_gradient:
        after_gather(cell);
        after(cell, index_.find(Kind::input_gradient, action.stage, action.microbatch));
        break;
      case Kind::update:
        if (reduced_[stage] != kNone) wiring_.clock.wait(wiring_.task(cell), {reduced_[stage]});
        for (const Task task : tied_[action.stage]) wiring_.clock.wait(wiring_.task(cell), task);
        break;
      case Kind::send_forward:
        deliver(cell, index_.find(Kind::receive_forward, action.stage + 1, action.microbatch),
                index_.find(Kind::forward, action.stage + 1, action.microbatch));
        after(cell, index_.find(Kind::forward, action.stage, action.microbatch));
        break;
      case Kind::send_backward:
        deliver(cell, index_.find(Kind::receive_backward, action.stage - 1, action.microbatch),
                index_.input_gradient(action.stage - 1, action.microbatch));
        after(cell, index_.input_gradient(action.stage, action.microbatch));
        break;
      case Kind::unshard: gathered_[stage] = collective(cell, own_communicator(cell.rank)).index; break;
      case Kind::reduce:
        reduced_[stage] = (shared_[stage] ? joined(cell, fmt::format("stage {}", action.stage))
                                          : collective(cell, own_communicator(cell.rank)))
                              .index;
        break;
      case Kind::tie: tied_[action.stage].push_back(joined(cell, fmt::format("tied weights {}", action.microbatch))); break;
      case Kind::receive_forward:
      case Kind::receive_backward:
      case Kind::reshard: break;
    }
  }

  // On the same rank one waits for the other; between ranks the message does.
  void after(Position cell, Position earlier) {
    if (earlier && earlier.rank == cell.rank) wiring_.clock.wait(wiring_.task(cell), wiring_.task(earlier));
  }

  void after_gather(Position cell) {
    const std::uint32_t task = gathered_[static_cast<std::size_t>(schedule_.at(cell).stage)];
    if (task != kNone) wiring_.clock.wait(wiring_.task(cell), {task});
  }

  // An implied message.
  void send(Position maker, Position reader, Kind kind) {
    if (!reader || reader.rank == maker.rank) return;
    const Action& action = schedule_.at(maker);
    transfer(maker, maker, reader, {action.stage, kind, action.microbatch});
  }

  void deliver(Position sender, Position receiver, Position reader) {
    transfer(sender, receiver, reader, schedule_.at(sender));
  }

  void transfer(Position sender, Position receiver, Position reader, const Action& action) {
    const Delivery message{sender.rank, reader.rank, action};
    const Task task = wiring_.clock.task(link(message.from, message.to), costs_.message(message),
                                         {wiring_.task(sender), wiring_.task(receiver)});
    wiring_.origin.push_back(wiring_.task(sender).index);
    wiring_.message_tasks.push_back(task);
    wiring_.messages.push_back(message);
    wiring_.clock.wait(wiring_.task(reader), task);
  }

  Task collective(Position cell, Resource communicator) {
    const Task task = wiring_.clock.task(communicator, costs_.action(schedule_.at(cell)), {wiring_.task(cell)});
    wiring_.origin.push_back(wiring_.task(cell).index);
    return task;
  }

  // A collective of several ranks of the table: the n-th that each issues is the same one.
  Task joined(Position cell, const std::string& communicator) {
    auto& tasks = joint_[communicator];
    const std::size_t number = issued_[communicator]++;
    if (number < tasks.size()) {
      wiring_.clock.wait(tasks[number], wiring_.task(cell));
    } else {
      tasks.push_back(collective(cell, named_communicator(communicator)));
    }
    return tasks[number];
  }

  Resource own_communicator(std::int32_t rank) {
    return named_communicator(fmt::format("data-parallel ranks of rank {}", rank));
  }

  Resource named_communicator(const std::string& name) {
    const auto found = communicators_.find(name);
    return found != communicators_.end() ? found->second
                                         : communicators_.emplace(name, wiring_.clock.resource(name)).first->second;
  }

  Resource link(std::int32_t from, std::int32_t to) {
    const auto key = static_cast<std::int64_t>(from) * schedule_.ranks() + to;
    const auto found = links_.find(key);
    if (found != links_.end()) return found->second;
    return links_.emplace(key, wiring_.clock.resource(fmt::format("rank {} to rank {}", from, to))).first->second;
  }

  const Schedule& schedule_;
  const Index& index_;
  const Costs& costs_;
  const bool messages_;
  Wiring wiring_;
  std::vector<bool> shared_;  // per stage: several ranks have it
  std::unordered_map<std::int64_t, Resource> links_;
  std::map<std::string, Resource> communicators_;
  std::map<std::string, std::vector<Task>> joint_;  // per communicator, in order
  // Of the row at hand.
  std::vector<std::uint32_t> gathered_, reduced_;  // per stage: the last such collective
  std::map<std::int32_t, std::vector<Task>> tied_;
  std::map<std::string, std::size_t> issued_;
};

}  // namespace

Position Wiring::cell(Task task) const {
  std::uint32_t index = task.index;
  const std::size_t cells = clock.tasks() - origin.size();
  if (index >= cells) index = origin[index - cells];
  const auto rank = static_cast<std::int32_t>(std::upper_bound(first.begin(), first.end(), index) - first.begin()) - 1;
  return {rank, static_cast<std::int32_t>(index - first[static_cast<std::size_t>(rank)])};
}

Wiring wire(const Schedule& schedule, const Index& index, const Costs& costs) {
  return Wirer(schedule, index, costs).wire();
}

}  // namespace bonfire::schedule
