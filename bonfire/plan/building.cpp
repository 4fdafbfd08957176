#include "bonfire/plan/building.h"

#include <algorithm>

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

}  // namespace

std::int64_t bytes_of_whole_build(const std::vector<FlatLayout>& flats, const DataParallel& layout) {
  Build build(layout);
  for (const auto& flat : flats) build.make_parameters(flat);
  for (const auto& flat : flats) build.make_flat(flat);
  return build.most();
}

std::int64_t bytes_unit_by_unit(const std::vector<CourseUnit>& units, const std::vector<FlatLayout>& flats,
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
