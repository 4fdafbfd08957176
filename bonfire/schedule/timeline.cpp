#include "bonfire/schedule/timeline.h"

#include <algorithm>
#include <array>

#include "bonfire/schedule/wiring.h"

namespace bonfire::schedule {

Costs::Costs(const StageCosts& stage, double message_seconds)
    : message([message_seconds](const Delivery&) { return message_seconds; }) {
  std::array<double, kKinds> seconds{};
  const auto set = [&](Kind kind, double value) { seconds[static_cast<std::size_t>(kind)] = value; };
  set(Kind::forward, stage.forward);
  set(Kind::backward, stage.backward);
  set(Kind::input_gradient, stage.input_gradient);
  set(Kind::weight_gradient, stage.weight_gradient);
  set(Kind::update, stage.update);
  set(Kind::unshard, stage.unshard);
  set(Kind::reduce, stage.reduce);
  set(Kind::tie, stage.tie);
  action = [seconds](const Action& cell) { return seconds[static_cast<std::size_t>(cell.kind)]; };
}

double Timeline::occupied(int rank) const {
  double first = makespan, last = 0;
  for (const Span& span : cells[static_cast<std::size_t>(rank)]) {
    if (span.end == span.start) continue;
    first = std::min(first, span.start);
    last = std::max(last, span.end);
  }
  return std::max(0.0, last - first);
}

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  const Index index(schedule);
  Wiring wiring = wire(schedule, index, costs);
  Clock& clock = wiring.clock;
  clock.run();

  Timeline timeline;
  timeline.makespan = clock.makespan();
  timeline.peak_activations = peak_activations(schedule);
  double busy = 0;
  for (std::int32_t rank = 0; rank < schedule.ranks(); ++rank) {
    auto& cells = timeline.cells.emplace_back();
    const auto count = static_cast<std::int32_t>(schedule.rows[static_cast<std::size_t>(rank)].size());
    cells.reserve(static_cast<std::size_t>(count));
    for (std::int32_t at = 0; at < count; ++at) {
      const Task task = wiring.task({rank, at});
      cells.push_back({clock.start(task), clock.end(task)});
    }
    timeline.busy.push_back(clock.busy(wiring.ranks[static_cast<std::size_t>(rank)]));
    busy += timeline.busy.back();
  }
  const double available = timeline.makespan * schedule.ranks();
  timeline.bubble = available > 0 ? (available - busy) / available : 0;
  for (const Task task : wiring.message_tasks) timeline.message_spans.push_back({clock.start(task), clock.end(task)});
  timeline.messages = std::move(wiring.messages);
  return timeline;
}

}  // namespace bonfire::schedule
