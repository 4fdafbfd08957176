#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"

// What activations are between and inside of split layers, and the ways from one to the other.
namespace bonfire {

// The ranks that split the layers of a module among them; all of them see the same samples. A value: where there is one
// rank, nothing is split. Between the split layers each rank has all of an activation, or, with `sequence`, its part of the
// positions: [batch, sequence / ranks, width].
struct TensorRanks {
  Group group{};
  bool sequence = false;
  int chunks = 1;  // into how many a product and the exchange beside it are cut, so that one goes on while the other does

  bool split() const { return group.size() > 1; }
};

// How an activation is cut into chunks, of the samples or, where there are fewer than chunks, of each rank's positions.
class SequenceChunks {
 public:
  // [batch, own positions, width], or with all positions.
  SequenceChunks(const TensorRanks& ranks, const at::Tensor& x, std::int64_t own_positions);

  int count() const { return count_; }
  // A chunk of what this rank has: [samples, own positions, width], a view.
  at::Tensor of_own(const at::Tensor& x, int chunk) const;
  // The same of all positions: [samples, ranks, own positions, width], a view.
  at::Tensor of_all(const at::Tensor& x, int chunk) const;

 private:
  std::int64_t ranks_, batch_, own_;
  int count_;
  bool by_samples_;
};

// A whole sequence on its way from its parts. Without `sequence` there is nothing to wait for.
class Gathering {
 public:
  Gathering(const TensorRanks& ranks, at::Tensor part);
  // [batch, sequence, width]. Once.
  at::Tensor finish();

 private:
  at::Tensor part_, all_;
  Work work_;
};

// A sum over the ranks on its way to each of them, or to each its part of the sequence.
class Summing {
 public:
  // `partial`: [batch, sequence, width], contiguous; it may be overwritten.
  Summing(const TensorRanks& ranks, at::Tensor partial);
  at::Tensor finish();

 private:
  at::Tensor partial_, out_;
  Work work_;
};

// Gradients of a parameter that every rank has whole: where each has made them of its part of the sequence, their sum.
at::Tensor summed_gradient(const TensorRanks& ranks, const at::Tensor& gradient);

// With autograd.
//
// The sum of what each rank has made a part of. Backward: each part's gradient is the sum's.
BONFIRE_API at::Tensor sum_of_parts(const at::Tensor& partial, const TensorRanks& ranks);
// sum_of_parts(partial) plus the rows of `positions` [at least sequence, width] of the positions that the rank has.
BONFIRE_API at::Tensor sum_of_parts(const at::Tensor& partial, const at::Tensor& positions, const TensorRanks& ranks);
// The same where the partial's positions are at `places` [sequence] or [batch, sequence] of them; undefined: in order.
BONFIRE_API at::Tensor sum_of_parts(const at::Tensor& partial, const at::Tensor& positions, const at::Tensor& places,
                                    const TensorRanks& ranks);
// Whole rows from each rank's columns, `columns` together. Backward: each rank's own columns. Collective.
BONFIRE_API at::Tensor gather_columns(const at::Tensor& own, std::int64_t columns, const TensorRanks& ranks);

}  // namespace bonfire
