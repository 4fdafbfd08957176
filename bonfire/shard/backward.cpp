#include "bonfire/shard/backward.h"

#include <utility>

namespace bonfire {

void Backward::begin(const ParameterLayout& layout, const BackwardKind& how) {
  running_ = true;
  how_ = how;
  arrived_.assign(layout.parameters().size(), 0);
  missing_.assign(layout.flats().size(), 0);
  missing_in_group_.assign(layout.groups().size(), 0);
  for (const auto& parameter : layout.parameters())
    if (parameter.trained) ++missing_[parameter.flat], ++missing_in_group_[parameter.group];
  finished_groups_.clear();
  next_ = 0;
}

bool Backward::arrived(std::size_t parameter, const LaidParameter& at) {
  if (++arrived_[parameter] != 1 + at.tied.size() || !how_.reduces) return false;
  if (--missing_in_group_[at.group] == 0) finished_groups_.push_back(at.group);
  return --missing_[at.flat] == 0;
}

bool Backward::finish(std::size_t flat, std::size_t group) {
  if (!running_ || !how_.reduces || std::exchange(missing_[flat], 0) == 0) return false;
  finished_groups_.push_back(group);
  return true;
}

std::optional<std::size_t> Backward::take_ready() {
  if (all_taken() || missing_[next_] != 0) return std::nullopt;
  return next_++;
}

}  // namespace bonfire
