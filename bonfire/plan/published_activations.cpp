#include "bonfire/plan/published_activations.h"

namespace bonfire::plan {

double published_bytes(const PublishedLayer& layer, Recomputed recomputed) {
  const double width = layer.sequence * layer.samples * layer.dim, ranks = layer.tensor;
  if (recomputed == Recomputed::layer) return 2 * width;  // its input
  // Inputs of both parts, of their norms, and two masks: what every rank has unless the sequence is divided.
  const double between = layer.sequence_parallel ? 10 / ranks : 10;
  const double attention = 5 * layer.heads * layer.sequence / layer.dim / ranks;
  return width * (between + 24 / ranks + (recomputed == Recomputed::attention ? 0 : attention));
}

double published_layers_held(double layers, double ranks, double chunks) {
  return chunks > 1 ? layers * (1 + (ranks - 1) / (ranks * chunks)) : layers;
}

}  // namespace bonfire::plan
