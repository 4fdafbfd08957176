#pragma once

#include "bonfire/base/api.h"

// What published work counts of activations, to compare with: closed forms that know nothing of our layers.
namespace bonfire::plan {

// A transformer layer with attention that keeps its weights, four times as wide in its feed-forward part, in two bytes, with
// dropout masks of one.
struct PublishedLayer {
  double sequence = 0, samples = 0, dim = 0, heads = 0;
  double tensor = 1;               // ranks that split it
  bool sequence_parallel = false;  // what is not split otherwise is divided along the sequence
};
enum class Recomputed { nothing, attention, layer };

// Bytes that a rank keeps of it for backward (Korthikanti et al., arXiv 2205.05198, table 2): of one rank alone
// 34 sbh + 5 a s^2 b.
BONFIRE_API double published_bytes(const PublishedLayer& layer, Recomputed recomputed);

// How many layers' activations the first rank of a 1F1B pipeline holds, of a model with so many layers: `chunks` stages on
// each rank, as many microbatches as the pipeline is deep.
BONFIRE_API double published_layers_held(double layers, double ranks, double chunks);

}  // namespace bonfire::plan
