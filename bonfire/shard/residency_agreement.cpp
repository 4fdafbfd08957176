#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "bonfire/shard/residency.h"

// How ranks agree on gathers for which there is no course yet, and what they take to be one afterwards.
namespace bonfire {

// Collective: one number of every rank.
std::vector<std::int64_t> Residency::everyones(std::int64_t mine) const {
  const at::NoGradGuard no_grad;
  const auto part = at::full({1}, mine, at::TensorOptions(at::kLong).device(pool_.device()));
  auto all = at::empty({options_.gathers.size()}, part.options());
  options_.gathers.all_gather(all, part).wait();
  const auto said = all.cpu();
  return {said.const_data_ptr<std::int64_t>(), said.const_data_ptr<std::int64_t>() + said.numel()};
}

// Collective: all ranks say what they need next (the Unit's number, and as many times all Units as its values are behind;
// -1: nothing in this pass any more) and gather what the first of them needs, until this rank has what it wants, or nobody
// wants anything.
void Residency::negotiate(std::ptrdiff_t wanted) {
  while (true) {
    const auto wants = everyones(wanted);
    const auto first = std::find_if(wants.begin(), wants.end(), [](std::int64_t want) { return want >= 0; });
    if (first == wants.end()) return;
    if (std::any_of(wants.begin(), wants.end(), [&](std::int64_t want) { return want != *first; })) differ_ = true;
    const auto other =
        std::find_if(wants.begin(), wants.end(), [&](std::int64_t want) { return want >= 0 && want != *first; });
    if (other != wants.end()) disagreed_ = true;
    if (disagreed_ && !options_.negotiate && !std::exchange(warned_of_disagreement_, true) && options_.gathers.rank() == 0) {
      const auto name = [&](std::int64_t want) { return units_[static_cast<std::size_t>(want) % units_.size()].home.name; };
      const auto rank = [&](const auto& want) {
        return options_.gathers.world_ranks()[static_cast<std::size_t>(want - wants.begin())];
      };
      options_.log.warning(
          "ranks disagree about which Unit runs next: '{}' on rank {}, '{}' on rank {}; they gather one after the other, in "
          "the order of the ranks",
          name(*first), rank(first), name(*other), rank(other));
    }
    const auto unit = static_cast<std::size_t>(*first) % units_.size();
    const FlatParameter::Source source{.group = options_.gathers,
                                       .behind = static_cast<int>(static_cast<std::size_t>(*first) / units_.size())};
    auto& flat = *units_[unit].home.flat;
    notes_.gathered(unit, source.behind);
    if (flat.present() && *first == wanted) {
      // With other values, which came for another rank.
      std::erase(spares_, unit);
      let_go(unit);
    }
    if (flat.present()) {
      flat.take_part(pool_, source);
      continue;
    }
    flat.bring_in(pool_, source);
    units_[unit].uses_left = 0;
    if (*first == wanted) return;
    spare(unit);
  }
}

// Collective: what this pass did becomes the course of those like it, where it was the same on all ranks.
void Residency::learn_course() {
  auto course = notes_.course();
  std::uint64_t digest = course.entries.size();
  for (const auto& entry : course.entries)
    for (const std::uint64_t part : {entry.unit * 2 + entry.from_kept, static_cast<std::uint64_t>(entry.behind)})
      digest = digest * 1099511628211u + part + 1;
  const auto digests = everyones(static_cast<std::int64_t>(digest));
  auto& known = courses_[static_cast<std::size_t>(pass_)];
  known.reset();
  if (std::count(digests.begin(), digests.end(), digests.front()) == static_cast<std::ptrdiff_t>(digests.size()))
    known = std::move(course);
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

}  // namespace bonfire
