#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/random/engine_case.h"
#include "tests/random/table_case.h"

// A pipeline as a value.
namespace bonfire::cases {

enum class PipelineAct {
  train,
  evaluate,
  step_alone,  // an update without a step of the pipeline before it
};

struct PipelineEvent {
  PipelineAct act = PipelineAct::train;
  int microbatches = 1;  // of an evaluation; a step has the table's
  int samples = 2;
  bool uneven = false;   // microbatches differ in size
  int length = 0;        // of sequences
  bool lengths = false;  // microbatches differ in it
  int frozen = 0;
  Mask mask = Mask::none;
  bool forgets_weights = false;  // at first: targets that are masked do not count, and nobody says so
};

struct PipelineCase {
  std::uint64_t seed = 0;
  Model model;  // sizes; its root is not used
  std::vector<Part> units;
  bool units_reversed = false;  // a stage registers its Units in the opposite order
  bool classes = false;         // the loss is a cross-entropy over the targets that count, else one of samples
  bool flags = false;           // numbers without a gradient cross the cuts, too
  bool example = false;
  std::vector<int> stages;  // Units of each; empty: evenly
  int replicate = 1, shard = 1;
  EngineOptions options;
  bool gathers_units = false;  // reshard_after_forward is said
  TableCase table;
  int receive_ahead = 1, resident = 2;
  Update update;
  bool update_in_cells = false;
  std::vector<PipelineEvent> script;

  int ranks() const { return table.ranks * replicate * shard; }
  int data_ranks() const { return replicate * shard; }
  bool comes_and_goes() const {
    return (options.what == plan::Sharded::parameters && shard > 1) || options.offload == plan::Offload::parameters;
  }
};

Verdict verdict_of(const PipelineCase& each);
PipelineCase draw_pipeline_case(std::uint64_t seed);
std::string text_of(const PipelineCase& each);
std::vector<PipelineCase> simpler(const PipelineCase& each);

}  // namespace bonfire::cases
