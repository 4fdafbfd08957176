#include "bonfire/shard/residency.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/recompute.h"

namespace bonfire {

void Residency::set_units(const std::vector<Home>& homes) {
  require(pass_ == Pass::none, "parameters cannot be laid out anew between forward and backward");
  units_.clear();
  index_.clear();
  graphs_.resize(homes.size());
  gathers_ = false;
  for (const auto& home : homes) {
    gathers_ = gathers_ || home.flat;
    index_[home.unit] = units_.size();
    units_.push_back({.home = home});
  }
}

void Residency::before_forward(UnitSeam& seam, std::vector<at::Tensor>& inputs) {
  const HostClock::Scope timed(host_);
  const std::size_t unit = index_of(seam);
  begin_pass(at::GradMode::is_enabled());
  ++depth_;
  forwards_.push_back(std::make_shared<Use>(Use{.unit = unit}));
  try {
    before(unit, inputs, forwards_.back());
  } catch (...) {
    end_forward_early();
    throw;
  }
}

// Whether a backward may come for the forward that runs. For one that runs again, backward goes through the graph of the
// first.
bool Residency::differentiates() { return at::GradMode::is_enabled() && !running_again(); }

void Residency::before(std::size_t unit, std::vector<at::Tensor>& inputs, const std::shared_ptr<Use>& use) {
  if (running_again()) require_same_values(unit);
  if (differentiates() && units_[unit].home.flat) {
    const auto given = inputs;
    put_gate(inputs, [weak = weak_from_this(), use] {
      if (const auto self = weak.lock()) self->leave_backward(*use);
    });
    for (std::size_t at = 0; at < given.size(); ++at)
      if (!inputs[at].is_same(given[at])) use->inputs.emplace_back(given[at], inputs[at]);
  }
  const auto* flat = units_[unit].home.flat;
  if (flat) use->generation = flat->generation();
  enter(*use, true);
  if (flat) flat->require_intact();
}

void Residency::after_forward(UnitSeam& seam, std::vector<at::Tensor>& outputs) {
  const HostClock::Scope timed(host_);
  try {
    after(index_of(seam), outputs, forwards_.back());
  } catch (...) {
    end_forward_early();
    throw;
  }
  forwards_.pop_back();
  if (--depth_ == 0 && pass_ == Pass::evaluation && options_.ends_evaluations) end_pass();
}

void Residency::after(std::size_t unit, std::vector<at::Tensor>& outputs, const std::shared_ptr<Use>& use) {
  if (units_[unit].home.flat && differentiates() && gate_outputs(outputs, use)) {
    ++units_[unit].outstanding;
    uses_.push_back(use);
    graphs_[unit].push_back(use);
  }
  leave(unit, true);
}

// Inputs that forward has written to in place are results as well: the caller has them, and backward comes back through
// them.
bool Residency::gate_outputs(std::vector<at::Tensor>& outputs, const std::shared_ptr<Use>& use) {
  const auto replaced = std::exchange(use->inputs, {});
  std::vector<const Replaced*> written;
  auto through = outputs;
  for (const auto& input : replaced) {
    if (!input.written()) continue;
    through.push_back(input.inside());
    require(
        input.can_follow(),
        "Unit '{}' writes in place to an input that is a view of another tensor, or a leaf: autograd cannot follow that; "
        "give the Unit a copy (clone) of it",
        units_[use->unit].home.name);
    written.push_back(&input);
  }
  const bool gated = put_gate(through, [weak = weak_from_this(), use] {
    if (const auto self = weak.lock()) self->enter_backward(use);
  });
  for (std::size_t at = 0; at < through.size(); ++at)
    if (at < outputs.size())
      outputs[at] = std::move(through[at]);
    else
      written[at - outputs.size()]->follow(through[at]);
  return gated;
}

void Residency::forward_failed(UnitSeam&) { end_forward_early(); }

// The Unit that runs threw. Whoever is around it may catch that and go on.
void Residency::end_forward_early() {
  const std::size_t unit = forwards_.back()->unit;
  forwards_.pop_back();
  if (--depth_ == 0) return abandon_pass();
  if (units_[unit].active > 0) leave(unit, true);
}

// A forward that runs again inside of a recomputed Unit does not say which of its uses it repeats.
void Residency::require_same_values(std::size_t unit) const {
  const auto* flat = units_[unit].home.flat;
  for (const auto& graph : graphs_[unit])
    if (const auto use = graph.lock(); use && !use->over)
      require(use->generation == flat->generation(),
              "Unit '{}' runs again inside of a recomputed Unit, but its parameters have changed since its forward; allowed "
              "with ShardOptions::versions: recomputed Units that hold no other Units",
              units_[unit].home.name);
}

void Residency::begin_pass(bool differentiates) {
  if (pass_ != Pass::none) return;
  if (options_.before_pass) options_.before_pass(differentiates);
  pass_ = differentiates ? Pass::training : Pass::evaluation;
  const auto& known = courses_[static_cast<std::size_t>(pass_)];
  course_ = known ? &*known : nullptr;
}

void Residency::begin_backward(bool retain_graph) {
  begin_pass(true);
  retain_graph_ = retain_graph;
  // Graphs of earlier passes that were retained: this backward may go through each of their uses.
  for (std::size_t unit = 0; unit < graphs_.size(); ++unit)
    for (const auto& graph : graphs_[unit]) {
      auto use = graph.lock();
      if (!use || use->over || std::find(uses_.begin(), uses_.end(), use) != uses_.end()) continue;
      ++units_[unit].outstanding;
      uses_.push_back(std::move(use));
    }
}

// Units whose inputs need no gradient end with backward.
void Residency::end_backward() {
  for (const auto& use : uses_) leave_backward(*use);
  std::erase_if(uses_, [](const auto& use) { return use->over; });
}

void Residency::end_computation() {
  if (pass_ == Pass::none || !gathers_) return;
  if (following()) {
    const auto& ends = course_->ends;
    // A Unit that this rank has left out may be of use to its next computation: what is issued stays.
    for (const auto end = computations_ < ends.size() ? ends[computations_] : next_; next_ < end;) issue_next();
  } else {
    negotiate(-1);
  }
  notes_.computation_ended();
  ++computations_;
}

bool Residency::expects_backward(const FlatParameter& flat) const {
  for (std::size_t at = 0; at < units_.size(); ++at)
    if (units_[at].home.flat == &flat)
      for (const auto& graph : graphs_[at])
        if (const auto use = graph.lock(); use && !use->over) return true;
  return false;
}

void Residency::forget_courses() {
  for (auto& course : courses_) course.reset();
}

void Residency::enter(const Use& use, bool ahead) {
  const std::size_t unit = use.unit;
  auto& at = units_[unit];
  ++at.active;
  if (!at.home.flat) return;
  auto& flat = *at.home.flat;
  if (flat.present() && flat.present_generation() != use.generation) {
    if (at.active == 1) release(unit, false);
    require(
        !flat.present(),
        "Unit '{}' is needed with different values at once: call Engine::backward for one of the graphs after the other, "
        "and outside of Engine::full_parameters()",
        at.home.name);
  }
  if (!flat.present()) need(unit, flat.behind(use.generation));
  require(flat.present_generation() == use.generation, "Unit '{}' was gathered with other values than its forward had",
          at.home.name);
  std::erase(spares_, unit);
  current_ = std::max(current_, at.entry);
  if (ahead) look_ahead();
  at.home.flat->await();
}

void Residency::leave(std::size_t unit, bool forward) {
  auto& at = units_[unit];
  --at.active;
  if (!at.home.flat) return;
  notes_.used(unit);
  if (at.uses_left > 0) --at.uses_left;
  if (at.active > 0) return;
  const bool backward_comes = at.outstanding > 0;
  const bool done = following() ? at.uses_left == 0 : !backward_comes || at.home.free_after_forward;
  if (done) release(unit, forward && backward_comes);
}

void Residency::enter_backward(const std::shared_ptr<Use>& use) {
  const HostClock::Scope timed(host_);
  begin_pass(true);
  const auto& at = units_[use->unit];
  require(
      !at.home.flat || at.home.flat->keeps(use->generation),
      "backward of Unit '{}' comes after its parameters have changed (an optimizer step since its forward?): its gradients "
      "would be those of other weights; ShardOptions::versions keeps older ones",
      at.home.name);
  use->running_backward = true;
  enter(*use, options_.prefetch_before_reduction);
}

void Residency::leave_backward(Use& use) {
  const HostClock::Scope timed(host_);
  if (!std::exchange(use.running_backward, false)) return;
  auto& at = units_[use.unit];
  use.over = !retain_graph_;
  at.outstanding = std::max(0, at.outstanding - 1);
  leave(use.unit, false);
  if (options_.backward_ended && at.active == 0 && at.outstanding == 0) options_.backward_ended(*at.home.flat);
  if (!options_.prefetch_before_reduction) look_ahead();
}

void Residency::release(std::size_t unit, bool backward_comes) {
  notes_.released(unit, backward_comes);
  let_go(unit);
}

void Residency::let_go(std::size_t unit) {
  auto& at = units_[unit];
  if (following() && gather_comes_from_kept(unit))
    at.home.flat->let_go_to(pool_, *options_.kept);
  else
    at.home.flat->let_go();
  at.entry = -1;
  at.uses_left = 0;
}

bool Residency::gather_comes_from_kept(std::size_t unit) const {
  if (!options_.kept) return false;
  for (std::size_t at = next_; at < course_->entries.size(); ++at)
    if (course_->entries[at].unit == unit) return course_->entries[at].from_kept;
  return false;
}

// How far ahead is a matter of the window; how much memory that takes follows from it.
void Residency::look_ahead() {
  if (!following()) return;
  const auto& entries = course_->entries;
  while (next_ < entries.size() && static_cast<std::ptrdiff_t>(next_) <= current_ + options_.prefetch) {
    if (units_[entries[next_].unit].home.flat->present()) return;
    notes_.gathered(entries[next_].unit, entries[next_].behind);
    issue_next();
  }
}

// Where the Unit is in anyway, the gather is for later uses of it.
void Residency::issue_next() {
  constexpr std::int64_t places_of_a_pass = 1 << 20;
  const std::size_t entry = next_++;
  const auto& what = course_->entries[entry];
  auto& at = units_[what.unit];
  auto& flat = *at.home.flat;
  const bool kept = what.from_kept && options_.kept;
  const FlatParameter::Source source{
      .group = kept ? *options_.kept : options_.gathers,
      .kept = kept,
      .behind = what.behind,
      .place = options_.first_place + static_cast<std::int64_t>(pass_) * places_of_a_pass + static_cast<std::int64_t>(entry),
      .beside = &from_host_};
  if (flat.present()) {
    flat.take_part(pool_, source);
    at.uses_left += what.uses;
    return;
  }
  flat.bring_in(pool_, source);
  at.entry = static_cast<std::ptrdiff_t>(entry);
  at.uses_left = what.uses;
}

// A gather that this rank does not need.
void Residency::pass_by_next() {
  const std::size_t unit = course_->entries[next_].unit;
  const bool was_in = units_[unit].home.flat->present();
  issue_next();
  if (!was_in) let_go(unit);
}

void Residency::leave_out(const FlatParameter& flat) {
  if (!following()) return;
  const auto& entries = course_->entries;
  std::size_t end = next_;
  for (std::size_t at = next_; at < entries.size(); ++at)
    if (units_[entries[at].unit].home.flat == &flat) end = at + 1;
  catch_up(end);
}

// Issues what is before this place of the course, and keeps what this rank will need.
void Residency::catch_up(std::size_t end) {
  while (next_ < end) {
    const auto& at = units_[course_->entries[next_].unit];
    at.active > 0 || expects_backward(*at.home.flat) ? issue_next() : pass_by_next();
  }
}

bool Residency::meet() {
  if (pass_ == Pass::none || !gathers_) return false;
  if (following())
    catch_up(static_cast<std::size_t>(options_.meetings.max(static_cast<double>(next_))));
  else
    negotiate(-1);
  return true;
}

void Residency::before_update() {
  if (!meet()) return;
  for (auto& unit : units_)
    if (unit.home.flat) unit.home.flat->await();
  clear_pass();
}

void Residency::need(std::size_t unit, int behind) {
  if (following()) {
    const auto& entries = course_->entries;
    std::size_t turn = next_;
    while (turn < entries.size() && (entries[turn].unit != unit || entries[turn].behind != behind)) ++turn;
    if (turn < entries.size()) {
      warn_of_order(unit, entries[next_].unit);
      while (next_ <= turn) {
        // Other values of the same Unit, for a use that this pass does not have, would be in the way.
        if (next_ < turn && entries[next_].unit == unit) {
          pass_by_next();
          continue;
        }
        notes_.gathered(entries[next_].unit, entries[next_].behind);
        issue_next();
      }
      return;
    }
    // That an older version is needed says nothing of the order of Units.
    if (behind == 0 && !std::exchange(warned_of_more_, true) && options_.gathers.rank() == 0)
      options_.log.warning(
          "Unit '{}' ran more often than in the first step; the ranks agree on a new order. If it is not so on all of them, "
          "set negotiate_order",
          units_[unit].home.name);
    // Whatever each rank has done so far, they begin to agree at the same place.
    while (next_ < entries.size()) pass_by_next();
    negotiating_ = true;
  }
  negotiate(static_cast<std::ptrdiff_t>(unit + static_cast<std::size_t>(behind) * units_.size()));
}

// Ranks cannot know, without a word, whether the others run another order as well: each speaks for itself.
void Residency::warn_of_order(std::size_t needed, std::size_t turn) {
  if (needed == turn || std::exchange(warned_of_order_, true)) return;
  options_.log.warning(
      "rank {} runs Unit '{}' where the first step ran '{}'; all-gathers keep the first step's order; this costs time and "
      "memory on all ranks",
      options_.gathers.world_ranks()[static_cast<std::size_t>(options_.gathers.rank())], units_[needed].home.name,
      units_[turn].home.name);
}

void Residency::end_pass() {
  end_backward();
  if (following()) {
    while (next_ < course_->entries.size()) pass_by_next();
  } else if (gathers_) {
    negotiate(-1);
    if (!options_.negotiate && !disagreed_) learn_course();
  }
  clear_pass();
}

void Residency::abandon_pass() {
  for (auto& unit : units_) {
    if (!unit.home.flat) continue;
    try {
      unit.home.flat->await();
    } catch (const std::exception&) {
      // What this pass waited for may never come. That it is over says somebody else.
    }
  }
  clear_pass();
  depth_ = 0;
  forwards_.clear();
}

void Residency::clear_pass() {
  for (auto& unit : units_) {
    if (unit.home.flat) unit.home.flat->forget_kept(), unit.home.flat->let_go();
    unit = Unit{.home = unit.home};
  }
  for (const auto& use : uses_) use->running_backward = false;
  pass_ = Pass::none;
  course_ = nullptr;
  for (auto& graphs : graphs_)
    std::erase_if(graphs, [](const auto& graph) {
      const auto use = graph.lock();
      return !use || use->over;
    });
  negotiating_ = disagreed_ = differ_ = retain_graph_ = false;
  current_ = -1;
  next_ = computations_ = 0;
  notes_ = {};
  uses_.clear();
  spares_.clear();
}

}  // namespace bonfire
