#pragma once

#include <functional>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"

namespace bonfire {

struct CostOptions {
  int repeats = 5;  // the least of so many counts, behind one that does not
  std::function<Nanoseconds()> clock = now_ns;
};

// Seconds that a forward and a backward of each Unit take. Each is built, run on what those before it make of the example,
// and let go.
BONFIRE_API std::vector<double> measure_units(const Chain& chain, const Microbatch& example,
                                              const CostOptions& options = {});

// What the first rank measures, for all of them, so that all cut the same stages. The others wait and leave the machine to
// it. Collective over the mesh.
BONFIRE_API std::vector<double> agreed_costs(const Mesh& mesh, const Chain& chain, const Microbatch& example,
                                             const CostOptions& options = {});

}  // namespace bonfire
