#include "bonfire/plan/step_events.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "bonfire/base/error.h"

namespace bonfire::plan {
namespace {

constexpr std::size_t nowhere = static_cast<std::size_t>(-1);

class Walk {
 public:
  Walk(const std::vector<StepUnit>& units, const DataParallel& layout)
      : units_(units), layout_(layout), factors_(layout.factors()) {
    std::size_t flats = 0;
    for (std::size_t at = 0; at < units.size(); ++at) {
      const auto& unit = units[at];
      if (unit.flat) flats = std::max(flats, *unit.flat + 1);
      if (unit.flat && !unit.root) last_ = at;
      for (const std::size_t flat : unit.writes) flats = std::max(flats, flat + 1);
    }
    for (std::size_t at = 0; at < units.size(); ++at)
      if (comes_and_goes(at)) gathers_.push_back({at, false});
    for (std::size_t at = units.size(); at-- > 0;)
      if (comes_and_goes(at) && units[at].backward && !stays(at)) gathers_.push_back({at, true});
    present_.resize(flats);
    open_.resize(flats);
    missing_.resize(flats);
    number_.resize(units.size());
  }

  std::vector<Event> run() && {
    for (microbatch_ = 0; microbatch_ < layout_.microbatches; ++microbatch_) pass();
    return std::move(events_);
  }

 private:
  struct Gather {
    std::size_t unit;
    bool backward;
  };

  void pass() {
    std::fill(present_.begin(), present_.end(), false);
    std::fill(open_.begin(), open_.end(), false);
    std::fill(missing_.begin(), missing_.end(), 0);
    for (const auto& unit : units_)
      for (const std::size_t flat : unit.writes) ++missing_[flat];
    issued_ = 0;
    for (std::size_t at = 0; at < units_.size(); ++at) forward(at);
    for (std::size_t at = units_.size(); at-- > 0;)
      if (units_[at].backward) backward(at);
    add(Act::end_of_pass, 0);
  }

  void forward(std::size_t at) {
    if (comes_and_goes(at)) {
      bring_in(at);
      gather_after(at);
    }
    add(Act::forward, at);
    if (!comes_and_goes(at)) return;
    if (!units_[at].backward)
      let_go(at);
    else if (!stays(at))
      let_go(at, layout_.reshard_ranks);
  }

  void backward(std::size_t at) {
    const auto& unit = units_[at];
    const bool before = layout_.backward_prefetch == BackwardPrefetch::before_reduction;
    if (comes_and_goes(at)) {
      bring_in(at);
      if (before) gather_after(at);
    }
    if (factors_.gradients > 1) {
      for (const std::size_t flat : unit.writes) {
        if (!open_[flat]) add(Act::open_gradients, flat);
        open_[flat] = true;
      }
    }
    add(Act::backward, at);
    const bool last = microbatch_ + 1 == layout_.microbatches;
    for (const std::size_t flat : unit.writes)
      if (--missing_[flat] == 0 && (last || factors_.gradients > 1)) add(Act::reduce, flat);
    if (!comes_and_goes(at)) return;
    let_go(at);
    if (!before) gather_after(at);
  }

  bool comes_and_goes(std::size_t at) const { return units_[at].flat && layout_.comes_and_goes(); }
  // Between forward and backward.
  bool stays(std::size_t at) const {
    return !layout_.reshard_after_forward || layout_.reshard_ranks == 1 || units_[at].root || at == last_;
  }

  void bring_in(std::size_t at) {
    while (!present_[*units_[at].flat]) gather();
  }

  void gather_after(std::size_t at) {
    const std::size_t end = number_[at] + static_cast<std::size_t>(layout_.prefetch) + 1;
    while (issued_ < std::min(end, gathers_.size()) && !present_[*units_[gathers_[issued_].unit].flat]) gather();
  }

  void gather() {
    const auto [at, backward] = gathers_[issued_];
    const std::size_t flat = *units_[at].flat;
    const int ranks = backward && layout_.reshard_ranks > 0 ? layout_.reshard_ranks : layout_.shard;
    events_.push_back({Act::gather, flat, microbatch_, ranks, static_cast<int>(issued_)});
    present_[flat] = true;
    number_[at] = issued_++;
  }

  void let_go(std::size_t at, int keep_among = 0) {
    const std::size_t flat = *units_[at].flat;
    present_[flat] = false;
    events_.push_back({keep_among > 0 ? Act::keep_part : Act::let_go, flat, microbatch_, keep_among});
  }

  void add(Act act, std::size_t index) { events_.push_back({act, index, microbatch_}); }

  const std::vector<StepUnit>& units_;
  const DataParallel& layout_;
  Factors factors_;
  std::vector<Gather> gathers_;  // of a pass
  std::size_t last_ = nowhere;   // the last Unit of forward that holds parameters
  std::vector<Event> events_;

  // Of the pass.
  int microbatch_ = 0;
  std::size_t issued_ = 0;            // gathers so far
  std::vector<char> present_, open_;  // per buffer
  std::vector<std::size_t> missing_;  // per buffer: Units whose backward has yet to add to its gradient
  std::vector<std::size_t> number_;   // per Unit: of its last gather
};

}  // namespace

std::string full_name(const UnitDescription& unit, const ParameterDescription& parameter) {
  return unit.name.empty() ? parameter.name : unit.name + "." + parameter.name;
}

std::vector<StepUnit> step_units(const ModelDescription& model, const std::vector<FlatLayout>& flats) {
  std::unordered_map<std::string, std::size_t> homes;  // of parameters
  for (std::size_t flat = 0; flat < flats.size(); ++flat)
    for (const auto& segment : flats[flat].segments) homes[segment.name] = flat;

  std::vector<StepUnit> units(model.units.size());
  std::size_t root = nowhere;
  for (std::size_t at = 0; at < units.size(); ++at) {
    const auto& from = model.units[at];
    auto& unit = units[at];
    unit.root = from.kind == UnitKind::root;
    if (from.parameters.empty()) continue;
    unit.flat = homes.at(full_name(from, from.parameters.front()));
    if (unit.root) root = at;
    const bool trained =
        std::any_of(from.parameters.begin(), from.parameters.end(), [](const auto& p) { return p.trained; });
    if (trained && !unit.root) unit.writes.push_back(*unit.flat);
  }
  // Whatever Units read of it, their backward finishes.
  const auto is_read = [&](const ParameterDescription& parameter) {
    return std::any_of(model.units.begin(), model.units.end(), [&](const UnitDescription& unit) {
      return std::find(unit.shared.begin(), unit.shared.end(), parameter.name) != unit.shared.end();
    });
  };
  if (root != nowhere && std::any_of(model.units[root].parameters.begin(), model.units[root].parameters.end(),
                                     [&](const auto& parameter) { return parameter.trained && !is_read(parameter); }))
    units[root].writes.push_back(*units[root].flat);
  bool reached = false;
  for (std::size_t at = 0; at < units.size(); ++at) {
    auto& unit = units[at];
    for (const auto& name : model.units[at].shared) {
      require(root != nowhere, "Unit \"{}\" reads the root's \"{}\", but the root holds nothing", model.units[at].name,
              name);
      for (const auto& parameter : model.units[root].parameters)
        if (parameter.name == name && parameter.trained &&
            !std::count(unit.writes.begin(), unit.writes.end(), *units[root].flat))
          unit.writes.push_back(*units[root].flat);
    }
    reached = reached || (!unit.root && !unit.writes.empty());
    unit.backward = unit.root || reached;
  }
  return units;
}

bool input_differentiates(const std::vector<StepUnit>& units, std::size_t unit, bool before) {
  if (unit == 0 || units[unit - 1].root) return before;
  return units[unit - 1].backward;
}

std::vector<Event> events_of_step(const std::vector<StepUnit>& units, const DataParallel& layout) {
  require(layout.replicate >= 1 && layout.microbatches >= 1 && layout.prefetch >= 0,
          "a layout of {} replicas, {} microbatches and {} Units ahead; allowed: at least 1, 1 and 0", layout.replicate,
          layout.microbatches, layout.prefetch);
  if (layout.reshard_ranks < 0 || (layout.reshard_ranks > 0 && layout.shard % layout.reshard_ranks != 0))
    fail_config("reshard_after_forward = {} with a sharding factor of {}; allowed: true, false, or a number that divides {}",
                layout.reshard_ranks, layout.shard, layout.shard);
  return Walk(units, layout).run();
}

int whole_gradient_limit(const DataParallel& layout) { return std::max(2, layout.prefetch + 1); }

}  // namespace bonfire::plan
