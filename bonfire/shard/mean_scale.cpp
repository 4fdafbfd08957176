#include "bonfire/shard/mean_scale.h"

#include <cmath>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

double mean_scale(const Engine& engine, double count) {
  require(std::isfinite(count) && count >= 0, "mean_scale of a count of {}; allowed: 0 and more", count);
  // A rank that has run out of data would not take part.
  require(!engine.options().uneven_inputs,
          "mean_scale with uneven_inputs, which averages over the ranks that still have data; allowed: one of the two");
  if (const auto* const others = dynamic_cast<const AveragesOthers*>(engine.options().hook.get()))
    fail("mean_scale beside {}; allowed: the mean over this rank's own targets", others->averaged_by());
  const auto& data = engine.groups().all;
  const double all = data.sum(count);
  return all > 0 ? data.size() / all : 0;
}

}  // namespace bonfire
