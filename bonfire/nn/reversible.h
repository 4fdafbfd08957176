#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/nn/dropout_state.h"

// Reversible blocks: two streams of one shape, x = [2, ...], and two functions that are added by turns,
//
//   y[0] = x[0] + first(x[1]),   y[1] = x[1] + second(y[0]),
//
// so that x can be made again from y. Backward does that, block by block from the last to the first, and runs each function
// once more for its gradient: of a chain of blocks, only what the last one has made is kept.
namespace bonfire {

// What consecutive blocks tell each other. A block whose input is what the one before it has made takes over to make that
// again, and nobody keeps it.
class BONFIRE_API ReversibleChain {
 public:
  // What a block has made, as its backward will find it.
  class Output;

  // Of the output whose memory this is, where it is the last that was made.
  std::shared_ptr<Output> output_in(const at::Tensor& streams) const;
  void made(const at::Tensor& streams, const std::shared_ptr<Output>& output);

 private:
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;
  std::weak_ptr<Output> output_;
};

struct ReversibleBlock {
  std::function<at::Tensor(const at::Tensor&x)> first, second;
  std::vector<at::Tensor> parameters{};      // of both
  std::shared_ptr<DropoutState> random{};    // what both drop by; null: nothing
  std::shared_ptr<ReversibleChain> chain{};  // of the blocks that follow each other
};

// Both functions must be of their argument and the parameters alone, and give the same again.
BONFIRE_API at::Tensor reversible(const at::Tensor& streams, const ReversibleBlock& block);

}  // namespace bonfire
