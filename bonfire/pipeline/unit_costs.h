#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"

namespace bonfire {

struct CostOptions {
  int repeats = 5;  // that count, behind one that does not
  std::function<Nanoseconds()> clock = now_ns;
};

// What a Unit costs, measured.
struct UnitCost {
  double least = 0;                                // seconds of a forward and a backward, at least
  double forward = 0, backward = 0;                // seconds: the median
  double forward_spread = 0, backward_spread = 0;  // between the quartiles
  std::int64_t output_bytes = 0;                   // of what goes to the next one
  std::int64_t parameter_bytes = 0, trained_bytes = 0;
  std::int64_t saved_bytes = 0;  // that a forward leaves behind until its backward, its output among them
};

// Each Unit is built, run on what those before it make of the example, and let go.
BONFIRE_API std::vector<UnitCost> profile_units(const Chain& chain, const Microbatch& example,
                                                const CostOptions& options = {});

// Seconds that a forward and a backward of each Unit take: the least of what profile_units measures.
BONFIRE_API std::vector<double> measure_units(const Chain& chain, const Microbatch& example,
                                              const CostOptions& options = {});

// What the first rank measures, for all of them, so that all cut the same stages. The others wait and leave the machine to
// it. Collective over the mesh.
BONFIRE_API std::vector<double> agreed_costs(const Mesh& mesh, const Chain& chain, const Microbatch& example,
                                             const CostOptions& options = {});

}  // namespace bonfire
