#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/random.h"
#include "bonfire/data/source.h"

namespace bonfire {

struct ClassOptions {
  std::uint64_t seed = 0;
  std::int64_t classes = 10;
  std::vector<std::int64_t> sizes;  // of one input, such as {3, 32, 32}
  double noise = 1;                 // its standard deviation; the patterns' is 1
  std::uint64_t size = unbounded;
};

// Synthetic images: each class has a repeating random pattern, and a sample is the pattern of its class plus normal noise.
// Inputs are fp32, targets are one int64 each. The nearest pattern is the best guess that any model can make.
class BONFIRE_API ClassSource : public Source {
 public:
  explicit ClassSource(const ClassOptions& options);

  std::uint64_t size() const override { return options_.size; }
  SampleField input() const override { return {options_.sizes, c10::ScalarType::Float}; }
  SampleField target() const override { return {{}, c10::ScalarType::Long}; }
  void read(std::uint64_t index, void* input, void* target) const override;

  // Element `element` of the pattern of a class.
  float pattern(std::int64_t a_class, std::int64_t element) const;

 private:
  ClassOptions options_;
  std::int64_t elements_;
  std::int64_t period_;
  std::vector<float> patterns_;  // [classes, period]
  Random samples_;
};

}  // namespace bonfire
