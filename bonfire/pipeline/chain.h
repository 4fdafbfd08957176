#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/pipeline/split.h"

namespace torch::nn {
class Module;
}

// A model as a pipeline sees it.
namespace bonfire {

using Tensors = std::vector<at::Tensor>;

// A slice of a batch. All ranks of a pipeline are given the same ones: the first stage reads the input, the last one the
// target, and everybody the shapes of the input. Microbatches may differ in all sizes, from each other and from step to
// step.
struct Microbatch {
  Tensors input;                  // what the first stage takes; the first dimension of the first one counts samples
  Tensors target{};               // what the last stage takes beside what came through the pipeline
  std::int64_t first_sample = 0;  // number of its first sample in the batch of all ranks, for dropout
  std::uint64_t step = 0;         // the same
  // What its loss weighs in the mean: of how many targets that loss is a mean, where some are masked. 0: it does not count,
  // as one that makes up the number on a rank that has run out of data. Said of all microbatches on all ranks, or of none:
  // then samples weigh alike, and an int64 target of -100 is an error, where it is on the CPU.
  std::optional<double> weight{};

  std::int64_t samples() const { return input.front().size(0); }
};

// Consecutive Units as one module.
struct StageModule {
  std::shared_ptr<torch::nn::Module> module;
  // What comes out for what came in: a list of tensors, whose first dimension counts samples, so that skip connections can
  // go along. The last stage returns the mean loss of the microbatch, and behind it numbers to report.
  std::function<Tensors(Tensors values, const Microbatch& microbatch)> forward;
};

// One value that several Units use. Where they are on different stages each has a copy, and all copies stay equal.
struct TiedWeight {
  struct Use {
    int unit = 0;
    std::string parameter{};  // its path in the module of any stage with that Unit
  };
  std::vector<Use> uses;
};

// A model as Units in a row. A rank builds those of its own stages and no others.
struct Chain {
  std::vector<std::string> units;  // their names, in forward order
  std::function<StageModule(UnitRange units)> build;
  std::vector<TiedWeight> tied{};
};

}  // namespace bonfire
