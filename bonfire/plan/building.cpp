#include "bonfire/plan/building.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "bonfire/plan/memory.h"

namespace bonfire::plan {
namespace {

std::int64_t bytes_as_made(const FlatLayout& flat) {
  std::int64_t bytes = 0;
  for (const auto& segment : flat.segments) bytes += segment.elements * bytes_of(flat.regions[segment.region].master);
  return bytes;
}

class Build {
 public:
  explicit Build(const DataParallel& layout) : layout_(layout) {}

  void make_parameters(const FlatLayout& flat) { hold(bytes_as_made(flat)); }
  void make_flat(const FlatLayout& flat) {
    const auto state = model_state({flat}, layout_, /*optimizer_states=*/0);
    hold(state.parameters + state.masters);
    now_ -= bytes_as_made(flat);
    hold(state.gradients);
  }

  std::int64_t most() const { return most_; }

 private:
  void hold(std::int64_t bytes) { most_ = std::max(most_, now_ += bytes); }

  const DataParallel& layout_;
  std::int64_t now_ = 0, most_ = 0;
};

// Memory that is held as long as a parameter, or its gradient, is in it.
struct Held {
  std::int64_t bytes = 0;
  int users = 0;
};

class Move {
 public:
  Move(const std::vector<FlatLayout>& from, const std::vector<FlatLayout>& to, const DataParallel& layout)
      : layout_(layout), factors_(layout.factors()) {
    hold(model_state(from, layout, /*optimizer_states=*/0).total());
    std::vector<const FlatLayout*> old;
    for (const auto& flat : from) {
      const bool stays = std::any_of(to.begin(), to.end(), [&](const auto& other) { return same_parameters(flat, other); });
      if (!stays) old.push_back(&flat);
    }
    for (const auto& flat : to) {
      if (std::any_of(from.begin(), from.end(), [&](const auto& other) { return same_parameters(flat, other); })) continue;
      for (const auto& segment : flat.segments)
        for (const auto*& before : old)
          if (before && std::any_of(before->segments.begin(), before->segments.end(),
                                    [&](const auto& other) { return other.name == segment.name; }))
            dissolve(*std::exchange(before, nullptr));
      make(flat);
    }
  }

  std::int64_t most() const { return most_; }

 private:
  // Parameters and gradients, whole, in memory that they alone keep alive.
  void dissolve(const FlatLayout& flat) {
    const auto state = model_state({flat}, layout_, /*optimizer_states=*/0);
    Held& parameters = new_memory(flat.bytes / factors_.parameters);
    std::int64_t gathered = 0;
    std::vector<Held*> values, gradients;
    for (const auto& region : flat.regions) {
      const bool apart = region.trained && region.compute != region.master;
      values.push_back(apart ? &new_memory(region.elements * bytes_of(region.master)) : &parameters);
      gradients.push_back(region.trained ? &new_memory(region.elements * bytes_of(layout_.gradient)) : nullptr);
      // One rank's part of it is all of it: nothing is gathered.
      if (apart && factors_.optimizer > 1) gathered += values.back()->bytes;
      if (region.trained && factors_.gradients > 1) gathered += gradients.back()->bytes;
    }
    for (const auto& segment : flat.segments) {
      ++(value_[segment.name] = values[segment.region])->users;
      if (gradients[segment.region]) ++(gradient_[segment.name] = gradients[segment.region])->users;
    }
    hold(gathered);
    now_ -= state.total() + gathered;
    if (parameters.users > 0) now_ += parameters.bytes;
    for (std::size_t at = 0; at < flat.regions.size(); ++at) {
      if (values[at] != &parameters) now_ += values[at]->bytes;
      if (gradients[at]) now_ += gradients[at]->bytes;
    }
  }

  void make(const FlatLayout& flat) {
    const auto state = model_state({flat}, layout_, /*optimizer_states=*/0);
    hold(state.parameters + state.masters);
    for (const auto& segment : flat.segments) leave(value_, segment.name);
    hold(state.gradients);
    for (const auto& segment : flat.segments) leave(gradient_, segment.name);
  }

  Held& new_memory(std::int64_t bytes) { return memory_.emplace_back(Held{bytes}); }
  void leave(const std::map<std::string, Held*>& where, const std::string& name) {
    const auto found = where.find(name);
    if (found != where.end() && --found->second->users == 0) now_ -= found->second->bytes;
  }
  void hold(std::int64_t bytes) { most_ = std::max(most_, now_ += bytes); }

  const DataParallel& layout_;
  Factors factors_;
  std::deque<Held> memory_;
  std::map<std::string, Held*> value_, gradient_;  // by parameter
  std::int64_t now_ = 0, most_ = 0;
};

}  // namespace

std::int64_t bytes_of_move(const std::vector<FlatLayout>& from, const std::vector<FlatLayout>& to,
                           const DataParallel& layout) {
  return Move(from, to, layout).most();
}

std::int64_t bytes_of_whole_build(const std::vector<FlatLayout>& flats, const DataParallel& layout) {
  Build build(layout);
  for (const auto& flat : flats) build.make_parameters(flat);
  for (const auto& flat : flats) build.make_flat(flat);
  return build.most();
}

std::int64_t bytes_unit_by_unit(const std::vector<StepUnit>& units, const std::vector<FlatLayout>& flats,
                                const DataParallel& layout) {
  Build build(layout);
  for (const auto& unit : units)
    if (unit.flat && unit.root) build.make_parameters(flats[*unit.flat]);
  for (const auto& unit : units) {
    if (!unit.flat || unit.root) continue;
    build.make_parameters(flats[*unit.flat]);
    build.make_flat(flats[*unit.flat]);
  }
  for (const auto& unit : units)
    if (unit.flat && unit.root) build.make_flat(flats[*unit.flat]);
  return build.most();
}

}  // namespace bonfire::plan
