#include "bonfire/pipeline/microbatch_weights.h"

#include <cmath>

#include <ATen/ops/eq.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/cross_entropy.h"

namespace bonfire {
namespace {

// Samples cannot weigh alike where some of their targets do not count. Targets on a GPU are not looked at: that would wait
// for it.
void require_no_masked_target(const Microbatch& microbatch, std::size_t number) {
  const auto ignored = CrossEntropyOptions{}.ignore_index;
  for (const auto& target : microbatch.target)
    require(
        !target.defined() || !target.is_cpu() || target.scalar_type() != at::kLong || !target.eq(ignored).any().item<bool>(),
        "microbatch {} has targets of {}, which are masked, and no Microbatch::weight; allowed: on all microbatches of "
        "all ranks, the number of targets that its loss is the mean of",
        number, ignored);
}

}  // namespace

MicrobatchWeights weights_of(const std::vector<Microbatch>& microbatches) {
  MicrobatchWeights weights{.said = microbatches.front().weight.has_value()};
  for (std::size_t at = 0; at < microbatches.size(); ++at) {
    const auto& weight = microbatches[at].weight;
    require(weight.has_value() == weights.said,
            "microbatch {} has {} weight, and microbatch 0 has {}; allowed: all of them, or none", at, weight ? "a" : "no",
            weights.said ? "one" : "none");
    require(!weight || (std::isfinite(*weight) && *weight >= 0), "microbatch {} has a weight of {}; allowed: 0 and more", at,
            weight.value_or(0));
    weights.each.push_back(weight ? *weight : static_cast<double>(microbatches[at].samples()));
    weights.total += weights.each.back();
  }
  for (std::size_t at = 0; at < microbatches.size() && !weights.said; ++at) require_no_masked_target(microbatches[at], at);
  for (auto& weight : weights.each) weight = weights.total > 0 ? weight / weights.total : 0;
  return weights;
}

}  // namespace bonfire
