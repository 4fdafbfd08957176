#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/pipeline/pipeline.h"

// Four Units in a row, the first and the last with a weight in common, and the same without a pipeline.
namespace bonfire::testing {

// `seed`: of the weights.
Chain four_units(int seed = 3);
// Two microbatches of the batch of a step, on one of the data-parallel ranks.
std::vector<Microbatch> four_units_batch(int step, int data_rank);
// The options for `ranks` ranks with `chunks` stages each.
PipelineOptions four_units_options(int ranks, int chunks, ShardOptions shard = {});

// By their paths; the weight in common has one.
using Weights = std::map<std::string, at::Tensor>;
struct PlainFourUnits {
  explicit PlainFourUnits(int seed = 3);
  // Gradients of the mean over the batches of all data-parallel ranks, times `scale`; returns that mean.
  double backward(int step, int data_ranks, double scale = 1);
  std::vector<at::Tensor> parameters() const;

  Weights weights;
};

// Of the stages on this rank, the largest distance to the plain ones. Collective.
double distance(Pipeline& pipeline, const PlainFourUnits& plain);

}  // namespace bonfire::testing
