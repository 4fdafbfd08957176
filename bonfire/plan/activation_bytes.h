#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/activations.h"
#include "bonfire/plan/convolution.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/memory.h"
#include "bonfire/plan/model.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {

// What it is kept in: as it is, or, where products round it to eight bits anyway, as they read it.
enum class KeptAs { computed, eight_bits };

// Only what the gradient of a trained weight needs is kept. REQUIRES: it is known which parameters are trained.
BONFIRE_API void keep_for_backward(ModelDescription& model, Kept kept, KeptAs as);

// Bytes of one microbatch's activations, Unit by Unit.
struct Activations {
  std::vector<std::int64_t> kept{};         // by forwards so far, when the Unit's has ended
  std::vector<std::int64_t> in_forward{};   // the most while it runs, where it keeps nothing
  std::vector<std::int64_t> in_backward{};  // the most while its backward runs, with what is kept
  std::vector<std::int64_t> incoming{};     // of that, the gradient of its result
  std::vector<std::int64_t> again{};        // of that, what its forward makes again and keeps
  std::int64_t on_host = 0;                 // inputs of recomputed Units that are kept there
  std::vector<std::int64_t> in_weights{};  // the most while the second half of a split backward makes its weights' gradients
};

// Of a Unit that has one.
Convolution convolution_of(const ModelDescription& model, const UnitDescription& unit);

// Whether what a Unit is given is among what it keeps for backward.
BONFIRE_API bool keeps_input(const ModelDescription& model, std::size_t unit);

struct ActivationOptions {
  MemoryOptions memory{};             // of which tokens, and who computes, matter
  bool input_differentiates = false;  // a gradient of what the first Unit is given is wanted: it comes from an earlier stage
};

// `units` are those of step_units.
BONFIRE_API Activations activations_of(const ModelDescription& model, const std::vector<StepUnit>& units,
                                       const DataParallel& layout, const ActivationOptions& options);

}  // namespace bonfire::plan
