#include "bonfire/plan/step_time.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/plan/loans.h"
#include "bonfire/plan/tensor_part.h"
#include "bonfire/schedule/clock.h"

namespace bonfire::plan {
namespace {

using schedule::Clock;
using schedule::Task;

class Builder {
 public:
  Builder(const std::vector<StepUnit>& units, const DataParallel& layout, const StepCosts& costs, Host host)
      : units_(units),
        layout_(layout),
        costs_(costs),
        host_(host),
        factors_(layout.factors()),
        gathered_(costs.flats.size()) {}

  StepTime run() && {
    const auto events = events_of_step(units_, layout_);
    const auto buffers = buffers_of(events);
    for (std::size_t at = 0; at < events.size(); ++at) add(events[at], buffers[at]);
    finish();
    clock_.run();
    StepTime time{.seconds = clock_.makespan(), .compute = clock_.busy(compute_), .communication = clock_.busy(wire_)};
    for (const auto& [event, task] : issued_)
      time.spans.push_back({event.act, event.index, event.microbatch, clock_.start(task), clock_.end(task)});
    return time;
  }

 private:
  // Which buffer of the pool each gather fills, and each let_go frees: as it is when the pool has settled. Sizes do not
  // matter, because the window alone decides how many are out.
  std::vector<std::size_t> buffers_of(const std::vector<Event>& events) const {
    Loans pool;
    std::vector<std::size_t> buffers(events.size()), loan(costs_.flats.size());
    for (int pass = 0; pass < 3; ++pass)
      for (std::size_t at = 0; at < events.size(); ++at) {
        const auto& event = events[at];
        if (event.act == Act::gather) buffers[at] = loan[event.index] = pool.borrow(1, event.place);
        if (event.act != Act::let_go && event.act != Act::keep_part) continue;
        buffers[at] = loan[event.index];
        pool.give_back(loan[event.index]);
      }
    return buffers;
  }

  void add(const Event& event, std::size_t buffer) {
    const auto& flat = costs_.flats[event.act == Act::forward || event.act == Act::backward ? 0 : event.index];
    switch (event.act) {
      case Act::gather: {
        const double seconds = is_second(event) && flat.gather_again > 0 ? flat.gather_again : flat.gather;
        last_use_.resize(std::max(last_use_.size(), buffer + 1));
        gathered_[event.index] = on_wire(event, seconds, host_ == Host::computes ? last_compute_ : last_use_[buffer]);
        break;
      }
      case Act::forward: computes(event, costs_.units[event.index].forward); break;
      case Act::backward: computes(event, costs_.units[event.index].backward); break;
      case Act::let_go:
      case Act::keep_part: last_use_[buffer] = last_compute_; break;
      case Act::open_gradients:
        if (flights_.size() < static_cast<std::size_t>(whole_gradient_limit(layout_))) break;
        waits_.push_back(flights_.front());
        flights_.pop_front();
        break;
      case Act::reduce: {
        if (layout_.shard > 1) flights_.push_back(on_wire(event, flat.reduce, last_compute_));
        const bool last = event.microbatch + 1 == layout_.microbatches;
        if (last && layout_.replicate > 1) on_wire(event, flat.across, last_compute_);
        break;
      }
      case Act::end_of_pass:
        wait_for_wire();
        flights_.clear();
        break;
    }
  }

  // Each Unit's first gather of a pass comes before all second ones.
  bool is_second(const Event& gather) const { return static_cast<std::size_t>(gather.place) >= costs_.flats.size(); }

  void computes(const Event& event, double seconds) {
    const auto& own = units_[event.index].flat;
    if (own && gathered_[*own]) waits_.push_back(*gathered_[*own]);
    last_compute_ = clock_.task(compute_, seconds, std::exchange(waits_, {}));
    issued_.push_back({event, *last_compute_});
  }

  Task on_wire(const Event& event, double seconds, std::optional<Task> after) {
    last_wire_ = after ? clock_.task(wire_, seconds, {*after}) : clock_.task(wire_, seconds);
    issued_.push_back({event, *last_wire_});
    return *last_wire_;
  }

  // The wire does one thing after the other, so its last task is the last to end.
  void wait_for_wire() {
    if (last_wire_) last_compute_ = clock_.task(compute_, 0, {*last_wire_});
  }

  // The loss, the norm, the update, and what it sends.
  void finish() {
    const int scalars = (layout_.ranks() > 1 ? 1 : 0) + (layout_.clip && factors_.optimizer > 1 ? 1 : 0);
    for (int at = 0; at < scalars; ++at) {
      last_wire_ = clock_.task(wire_, costs_.scalar, {*last_compute_});
      wait_for_wire();
    }
    const bool sends = factors_.optimizer > factors_.parameters;
    for (const auto& flat : costs_.flats) {
      const auto updated = clock_.task(compute_, costs_.update / static_cast<double>(costs_.flats.size()));
      if (sends) clock_.task(wire_, flat.refresh, {updated});
    }
  }

  const std::vector<StepUnit>& units_;
  const DataParallel& layout_;
  const StepCosts& costs_;
  Host host_;
  Factors factors_;
  Clock clock_;
  schedule::Resource compute_ = clock_.resource("compute"), wire_ = clock_.resource("communication");

  struct Issued {
    Event event;
    Task task;
  };
  std::vector<Issued> issued_;
  std::optional<Task> last_compute_, last_wire_;
  std::vector<std::optional<Task>> gathered_;  // per flat: its last gather
  std::vector<std::optional<Task>> last_use_;  // per buffer of the pool
  std::deque<Task> flights_;                   // reductions of whole gradients that hold memory
  std::vector<Task> waits_;                    // what the next computation waits for
};

}  // namespace

double part_made_again(const ModelDescription& model, const UnitDescription& unit) {
  if (unit.recompute != Recompute::selective) return unit.recompute == Recompute::full ? 1 : 0;
  double elements = 0;
  for (const auto& parameter : unit.parameters) {
    const bool first = parameter.name == "attention.qkv.weight" || parameter.name == "feed.up.weight" ||
                       parameter.name == "feed.gate_up.weight";
    if (first) elements += static_cast<double>(parameter.elements());
  }
  return 2 * elements / unit.forward_flops(model.spec.positions);
}

StepCosts recomputing(StepCosts costs, const ModelDescription& model) {
  require(costs.units.size() == model.units.size(), "costs of {} Units for a model of {}", costs.units.size(),
          model.units.size());
  for (std::size_t at = 0; at < model.units.size(); ++at)
    costs.units[at].backward += part_made_again(model, model.units[at]) * costs.units[at].forward;
  return costs;
}

StepCosts exchanging(StepCosts costs, const ModelDescription& model, const DataParallel& layout,
                     const ExchangeLinks& links) {
  require(costs.units.size() == model.units.size(), "costs of {} Units for a model of {}", costs.units.size(),
          model.units.size());
  const Exchange how{.tokens = layout.tokens,
                     .samples = layout.samples,
                     .element_bytes = bytes_of(layout.compute),
                     .context = layout.context};
  const auto seconds = [&](const std::vector<Collective>& list) {
    double sum = 0;
    for (const auto& one : list)
      sum += one.axis == Axis::context ? seconds_over(links.context, one, layout.context.ranks)
                                       : seconds_over(links.tensor, one, model.tensor.ranks);
    return sum;
  };
  const auto units = step_units(model, flats_of(model, layout));
  for (std::size_t at = 0; at < units.size(); ++at) {
    costs.units[at].forward += seconds(exchanged_in_forward(model, at, how));
    if (!units[at].backward) continue;
    costs.units[at].backward += seconds(exchanged_in_backward(model, at, how, input_differentiates(units, at, false)));
  }
  return costs;
}

StepTime time_of_step(const std::vector<StepUnit>& units, const DataParallel& layout, const StepCosts& costs, Host host) {
  std::size_t flats = 0;
  for (const auto& unit : units) flats = std::max(flats, unit.flat ? *unit.flat + 1 : 0);
  require(costs.units.size() == units.size() && costs.flats.size() == flats,
          "the time of a step of {} Units and {} buffers was given costs of {} and {}", units.size(), flats,
          costs.units.size(), costs.flats.size());
  return Builder(units, layout, costs, host).run();
}

}  // namespace bonfire::plan
