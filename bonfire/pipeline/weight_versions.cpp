#include "bonfire/pipeline/weight_versions.h"

#include <algorithm>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

WeightVersions::WeightVersions(ScheduleDriver& driver, Options options) : driver_(driver), options_(std::move(options)) {
  restart();
}

void WeightVersions::restart() {
  require(of_forwards_.empty(), "{}: {} forwards are on their way", options_.name, of_forwards_.size());
  first_ = driver_.generation();
  updates_ = 0;
}

std::int64_t WeightVersions::generation_of(int version) const { return changes() ? first_ + version : first_; }

void WeightVersions::bring_in(std::int64_t generation) {
  driver_.unshard(static_cast<int>(driver_.generation() - generation));
  require(driver_.present_generation() == generation, "{}: weights of generation {} are in place of {}", options_.name,
          driver_.present_generation(), generation);
}

void WeightVersions::begin_forward(int microbatch, int version) {
  require(version >= 0 && version <= updates(),
          "{}: microbatch {} needs version {} of its weights, and {} updates were made", options_.name, microbatch, version,
          updates());
  bring_in(generation_of(version));
  of_forwards_[microbatch] = driver_.present_generation();
}

void WeightVersions::begin_backward(int microbatch) {
  const auto node = of_forwards_.extract(microbatch);
  require(!node.empty(), "{}: a backward of microbatch {} without its forward", options_.name, microbatch);
  bring_in(options_.stash ? node.mapped() : driver_.generation());
  staleness_ = std::max(staleness_, static_cast<int>(driver_.generation() - node.mapped()));
}

void WeightVersions::updated() {
  ++updates_;
  require(driver_.generation() == generation_of(updates_), "{}: update {} has made generation {} of the weights, not {}",
          options_.name, updates_ - 1, driver_.generation(), generation_of(updates_));
  staleness_ = 0;
}

void WeightVersions::forget() {
  of_forwards_.clear();
  staleness_ = 0;
}

}  // namespace bonfire
