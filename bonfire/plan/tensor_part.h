#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/model.h"

// What follows from the splits that a description names: a rank's part of each parameter, and what ranks exchange.
namespace bonfire::plan {

// Throws ConfigError, which begins with the key that stands against it, where so many ranks cannot divide the layers.
BONFIRE_API void require_splits(const ModelSpec& resolved, const TensorPart& part);

// Leaves of every parameter what the description's rank has of it. REQUIRES: they are whole.
void take_part(ModelDescription& model);

// Of what lies between split layers, so many elements of all samples' positions, those that a rank has: all of them, or
// those of its part of the sequence.
std::int64_t elements_between(const TensorPart& part, std::int64_t elements);
// Elements that a rank hands on from a Unit to the next one for so many tokens.
std::int64_t handed_on(const ModelDescription& model, const UnitDescription& unit, std::int64_t tokens = 1);

// Logits of a token on the rank that has most of them: by these all ranks divide them into the same chunks.
std::int64_t longest_logits(const ModelDescription& model, const UnitDescription& head);

// What crosses between the ranks that split the layers, and those that share samples, while one of the Units runs on a
// microbatch.
struct Exchange {
  std::int64_t tokens = 0;  // of a rank
  std::int64_t samples = 1;
  std::int64_t element_bytes = 4;  // of activations
  ContextLayout context{};
};
BONFIRE_API std::vector<Collective> exchanged_in_forward(const ModelDescription& model, std::size_t unit,
                                                         const Exchange& exchange);
// `reached`: what comes in has a gradient.
BONFIRE_API std::vector<Collective> exchanged_in_backward(const ModelDescription& model, std::size_t unit,
                                                          const Exchange& exchange, bool reached);

}  // namespace bonfire::plan
