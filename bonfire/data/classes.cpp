#include "bonfire/data/classes.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire {

// A prime, so that no pattern repeats exactly from row to row of an image.
static constexpr std::int64_t longest_period = 1021;

ClassSource::ClassSource(const ClassOptions& options) : options_(options), samples_(Random(options.seed).fork("samples")) {
  if (options.classes < 1) fail_config("classes is {}, must be at least 1", options.classes);
  for (const auto size : options.sizes)
    if (size < 1) fail_config("sizes of an input are [{}], must be positive", fmt::join(options.sizes, ", "));
  elements_ = input().elements();
  period_ = std::min(elements_, longest_period);
  const Random patterns = Random(options.seed).fork("patterns");
  patterns_.resize(static_cast<std::size_t>(options.classes * period_));
  for (std::size_t at = 0; at < patterns_.size(); ++at) patterns_[at] = static_cast<float>(patterns.normal(at));
}

float ClassSource::pattern(std::int64_t a_class, std::int64_t element) const {
  return patterns_[static_cast<std::size_t>(a_class * period_ + element % period_)];
}

void ClassSource::read(std::uint64_t index, void* input, void* target) const {
  require(index < options_.size, "sample {} asked of {}", index, options_.size);
  const Random random = samples_.fork(index);
  const auto drawn = static_cast<std::int64_t>(random.fork("class").below(0, static_cast<std::uint64_t>(options_.classes)));
  auto* values = static_cast<float*>(input);
  for (std::int64_t at = 0; at < elements_; ++at)
    values[at] = pattern(drawn, at) + static_cast<float>(options_.noise * random.normal(static_cast<std::uint64_t>(at)));
  *static_cast<std::int64_t*>(target) = drawn;
}

}  // namespace bonfire
