#pragma once

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

// The loss over logits of which every rank has some columns: what one has to tell the others, and what it makes of theirs.
// Outside autograd.
namespace bonfire {

// Of each row of `logits` [rows, own columns]: its largest, the sum of the exponentials of all less that, and the logit of
// the target, 0 where that is another's. [rows, 3], in fp64. `target` counts from the first of the own columns.
BONFIRE_API at::Tensor partial_softmax(const at::Tensor& logits, const at::Tensor& target);

struct JoinedSoftmax {
  at::Tensor losses;  // [rows], in fp64
  at::Tensor sums;    // their logarithms, with the largest logit in them: log(sum(exp(logits)))
};
// Of what all ranks have told, [ranks, rows, 3].
BONFIRE_API JoinedSoftmax join_softmax(const at::Tensor& partial);

struct OwnGradient {
  at::Tensor target;   // as above
  at::Tensor sums;     // of the whole rows
  at::Tensor counted;  // bool, [rows]: false where the target is ignored
};
// Leaves softmax minus one-hot in the logits.
BONFIRE_API void make_own_gradient(const at::Tensor& logits, const OwnGradient& of);

}  // namespace bonfire
