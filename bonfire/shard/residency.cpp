#include "bonfire/shard/residency.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/gate.h"

namespace bonfire {
namespace {

void cast(std::vector<at::Tensor>& tensors, const std::optional<at::ScalarType>& type) {
  if (!type) return;
  for (auto& tensor : tensors)
    if (tensor.is_floating_point() && tensor.scalar_type() != *type) tensor = tensor.to(*type);
}

}  // namespace

void Residency::set_units(const std::vector<Home>& homes) {
  require(pass_ == Pass::none, "parameters cannot be laid out anew between forward and backward");
  units_.clear();
  index_.clear();
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
  const bool differentiates = at::GradMode::is_enabled();
  begin_pass(differentiates ? Pass::training : Pass::evaluation);
  if (options_.debug) check_memory(inputs, units_[unit]);
  ++depth_;
  auto use = std::make_shared<Use>(Use{.unit = unit});
  forwards_.push_back(use);
  cast(inputs, options_.inputs);
  if (differentiates && units_[unit].home.flat)
    put_gate(inputs, [weak = weak_from_this(), use] {
      if (const auto self = weak.lock()) self->leave_backward(*use);
    });
  enter(unit, true);
  if (const auto* flat = units_[unit].home.flat) {
    flat->require_intact();
    use->generation = flat->generation();
  }
}

void Residency::after_forward(UnitSeam& seam, std::vector<at::Tensor>& outputs) {
  const HostClock::Scope timed(host_);
  const std::size_t unit = index_of(seam);
  const auto use = forwards_.back();
  forwards_.pop_back();
  if (options_.debug) check_memory(outputs, units_[unit]);
  if (depth_ == 1) cast(outputs, options_.outputs);
  const bool gated =
      units_[unit].home.flat && at::GradMode::is_enabled() && put_gate(outputs, [weak = weak_from_this(), use] {
        if (const auto self = weak.lock()) self->enter_backward(*use);
      });
  if (gated) {
    ++units_[unit].outstanding;
    uses_.push_back(use);
  }
  leave(unit, true);
  if (--depth_ == 0 && pass_ == Pass::evaluation) end_pass();
}

void Residency::forward_failed(UnitSeam&) {
  if (--depth_ <= 0) abandon_pass();
}

void Residency::begin_pass(Pass pass) {
  if (pass_ != Pass::none) return;
  if (options_.before_pass) options_.before_pass();
  pass_ = pass;
  const auto& known = courses_[static_cast<std::size_t>(pass)];
  course_ = known ? &*known : nullptr;
}

void Residency::enter(std::size_t unit, bool ahead) {
  auto& at = units_[unit];
  ++at.active;
  if (!at.home.flat) return;
  if (!at.home.flat->present()) need(unit);
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
  const bool done = following() ? at.uses_left == 0 : !backward_comes || options_.free_after_forward;
  if (done) release(unit, forward && backward_comes);
}

void Residency::enter_backward(Use& use) {
  const HostClock::Scope timed(host_);
  begin_pass(Pass::training);
  const auto& at = units_[use.unit];
  require(
      !at.home.flat || use.generation == at.home.flat->generation(),
      "backward of Unit '{}' comes after its parameters have changed (an optimizer step since its forward?): its gradients "
      "would be those of other weights",
      at.home.name);
  use.running_backward = true;
  enter(use.unit, options_.prefetch_before_reduction);
}

void Residency::leave_backward(Use& use) {
  const HostClock::Scope timed(host_);
  if (!std::exchange(use.running_backward, false)) return;
  --units_[use.unit].outstanding;
  leave(use.unit, false);
  if (!options_.prefetch_before_reduction) look_ahead();
}

void Residency::release(std::size_t unit, bool backward_comes) {
  auto& at = units_[unit];
  notes_.released(unit, backward_comes);
  if (following() && gather_comes_from_kept(unit))
    at.home.flat->let_go_to(pool_, options_.kept);
  else
    at.home.flat->let_go();
  at.entry = -1;
}

bool Residency::gather_comes_from_kept(std::size_t unit) const {
  if (options_.kept.size() == 1) return false;
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
    issue(next_++);
  }
}

void Residency::issue(std::size_t entry) {
  const auto& what = course_->entries[entry];
  auto& at = units_[what.unit];
  constexpr std::int64_t places_of_a_pass = 1 << 20;
  at.home.flat->bring_in(pool_, options_.gathers,
                         static_cast<std::int64_t>(pass_) * places_of_a_pass + static_cast<std::int64_t>(entry));
  notes_.gathered(what.unit);
  at.entry = static_cast<std::ptrdiff_t>(entry);
  at.uses_left = what.uses;
}

void Residency::need(std::size_t unit) {
  if (following()) {
    const auto& entries = course_->entries;
    std::size_t turn = next_;
    while (turn < entries.size() && entries[turn].unit != unit) ++turn;
    if (turn < entries.size()) {
      for (; next_ < turn; ++next_) {
        const std::size_t other = entries[next_].unit;
        if (units_[other].home.flat->present()) {
          units_[other].home.flat->take_part(pool_, options_.gathers);
        } else {
          issue(next_);
          spare(other);
        }
      }
      issue(next_++);
      return;
    }
    options_.log.debug("Unit '{}' is needed once more than in the order of the first step", units_[unit].home.name);
    negotiating_ = true;
  }
  negotiate(static_cast<std::ptrdiff_t>(unit));
}

// Collective: all ranks say what they need next (-1: nothing in this pass any more) and gather what the first of them needs,
// until this rank has what it wants, or nobody wants anything.
void Residency::negotiate(std::ptrdiff_t wanted) {
  const auto& group = options_.gathers;
  const at::NoGradGuard no_grad;
  while (true) {
    const auto mine = at::full({1}, wanted, at::TensorOptions(at::kLong).device(pool_.device()));
    auto all = at::empty({group.size()}, mine.options());
    group.all_gather(all, mine).wait();
    const auto said = all.cpu();
    const std::vector<std::int64_t> wants(said.const_data_ptr<std::int64_t>(),
                                          said.const_data_ptr<std::int64_t>() + said.numel());
    const auto first = std::find_if(wants.begin(), wants.end(), [](std::int64_t want) { return want >= 0; });
    if (first == wants.end()) return;
    const auto other =
        std::find_if(wants.begin(), wants.end(), [&](std::int64_t want) { return want >= 0 && want != *first; });
    if (other != wants.end() && !std::exchange(disagreed_, true)) {
      const auto name = [&](std::int64_t want) { return units_[static_cast<std::size_t>(want)].home.name; };
      options_.log.warning(
          "ranks disagree about which Unit runs next: '{}' on rank {}, '{}' on rank {}; they gather one after the other, in "
          "the order of the ranks",
          name(*first), group.world_ranks()[static_cast<std::size_t>(first - wants.begin())], name(*other),
          group.world_ranks()[static_cast<std::size_t>(other - wants.begin())]);
    }
    const auto unit = static_cast<std::size_t>(*first);
    auto& flat = *units_[unit].home.flat;
    if (flat.present()) {
      flat.take_part(pool_, group);
      continue;
    }
    flat.bring_in(pool_, group, -1);
    notes_.gathered(unit);
    units_[unit].uses_left = 0;
    if (*first == wanted) return;
    spare(unit);
  }
}

// Gathered because others are ahead: kept for its own turn, but not without limit.
void Residency::spare(std::size_t unit) {
  spares_.push_back(unit);
  while (spares_.size() > static_cast<std::size_t>(options_.prefetch) + 1) {
    const std::size_t oldest = spares_.front();
    spares_.pop_front();
    if (units_[oldest].active == 0) release(oldest, false);
  }
}

void Residency::end_pass() {
  begin_pass(Pass::training);
  // Units whose inputs need no gradient end with backward.
  for (const auto& use : uses_) leave_backward(*use);
  if (following()) {
    for (; next_ < course_->entries.size(); ++next_)
      units_[course_->entries[next_].unit].home.flat->take_part(pool_, options_.gathers);
  } else if (gathers_) {
    negotiate(-1);
    if (!disagreed_ && !options_.negotiate) courses_[static_cast<std::size_t>(pass_)] = notes_.course();
  }
  clear_pass();
}

void Residency::abandon_pass() {
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
  negotiating_ = disagreed_ = false;
  current_ = -1;
  next_ = 0;
  notes_ = {};
  uses_.clear();
  spares_.clear();
}

void Residency::check_memory(const std::vector<at::Tensor>& tensors, const Unit& at) const {
  for (const auto& tensor : tensors)
    for (const auto& unit : units_) {
      if (!unit.home.flat || unit.home.flat->present()) continue;
      const auto name = unit.home.flat->parameter_in(tensor);
      require(name.empty(),
              "a tensor at the seam of Unit '{}' lies in parameter '{}', whose memory is out: it may be read only "
              "while its Unit runs, or inside Engine::full_parameters",
              at.home.name, name);
    }
}

}  // namespace bonfire
