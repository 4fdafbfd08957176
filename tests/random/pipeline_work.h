#pragma once

#include <map>
#include <string>
#include <vector>

#include "bonfire/pipeline/chain.h"
#include "tests/random/parts.h"
#include "tests/random/pipeline_case.h"
#include "tests/random/plain.h"

// What both sides of a comparison of pipelines do, and the oracle.
namespace bonfire::cases {

// Units in a row as one module. Each is "u" and its number.
class RowImpl : public torch::nn::Module {
 public:
  RowImpl(const PipelineCase& each, const UnitRange& units, bool plain, double off = 0);
  // The last one returns the mean loss of the samples, and behind it a number to report.
  Tensors forward(Tensors values, const Microbatch& microbatch);

 private:
  PipelineCase each_;
  UnitRange units_;
  std::vector<std::shared_ptr<PartImpl>> parts_;
};

std::vector<Microbatch> batch_of(const PipelineCase& each, int event, int data_rank);
// How much a microbatch counts: its targets that do, or its samples.
double weight_of(const PipelineCase& each, const Microbatch& microbatch);

struct PipelineRecord {
  double loss = 0, report = 0;  // means over all data-parallel ranks
  std::vector<double> weights_of_ranks;
  double norm = 0;
  Weights weights;  // afterwards
  double tolerance = 0;
};
struct PlainPipeline {
  std::vector<PipelineRecord> events;
  Names names;
  std::map<std::string, bool> trained;  // as the Units were built
  std::string chosen;                   // the parameter that is ignored, where one is; empty: all have several uses
};
PlainPipeline run_plainly(const PipelineCase& each);

void freeze(const PipelineCase& each, torch::nn::Module& module, const PlainPipeline& plain, int pattern);

}  // namespace bonfire::cases
