#include "bonfire/kernels/partial_cross_entropy.h"

#include <algorithm>

#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>

namespace bonfire {
namespace {

using at::Tensor;

// Some rows at a time, so that copies stay small: on a CPU in its cache, on a GPU small beside all of it.
std::int64_t piece_elements(const Tensor& logits) { return std::int64_t{1} << (logits.is_cpu() ? 15 : 26); }

at::ScalarType wide_type(const Tensor& logits) { return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// The column of each row's target among the own ones; whether there is one.
struct Wanted {
  Tensor inside, column;
};
Wanted wanted_in(const Tensor& target, std::int64_t columns) {
  Tensor inside = target.ge(0).logical_and_(target.lt(columns));
  Tensor column = target.clamp(0, columns - 1);
  return {std::move(inside), std::move(column)};
}

template <class Body>
void for_each_piece(const Tensor& logits, const Body& body) {
  const std::int64_t rows = logits.size(0), piece = std::max<std::int64_t>(1, piece_elements(logits) / logits.size(1));
  for (std::int64_t begin = 0; begin < rows; begin += piece) body(begin, std::min(piece, rows - begin));
}

}  // namespace

Tensor partial_softmax(const Tensor& logits, const Tensor& target) {
  Tensor found = at::empty({logits.size(0), 3}, logits.options().dtype(at::kDouble));
  const auto [inside, column] = wanted_in(target, logits.size(1));
  for_each_piece(logits, [&](std::int64_t begin, std::int64_t count) {
    const Tensor rows = logits.narrow(0, begin, count), to = found.narrow(0, begin, count);
    const Tensor top = rows.amax(1, true);
    to.select(1, 0).copy_(top.squeeze(1));
    to.select(1, 1).copy_(rows.to(wide_type(logits)).sub(top).exp_().sum(1, false, at::kDouble));
    to.select(1, 2).copy_(rows.gather(1, column.narrow(0, begin, count).unsqueeze(1)).squeeze(1));
  });
  found.select(1, 2).mul_(inside);
  return found;
}

JoinedSoftmax join_softmax(const Tensor& partial) {
  const Tensor sums = partial.select(2, 1).log().add_(partial.select(2, 0)).logsumexp(0);
  return {.losses = sums.sub(partial.select(2, 2).sum(0)), .sums = sums};
}

void make_own_gradient(const Tensor& logits, const OwnGradient& of) {
  const auto [inside, column] = wanted_in(of.target, logits.size(1));
  const Tensor one = inside.logical_and(of.counted).to(wide_type(logits)).neg_();
  for_each_piece(logits, [&](std::int64_t begin, std::int64_t count) {
    const Tensor rows = logits.narrow(0, begin, count);
    const auto piece = [&](const Tensor& all) { return all.narrow(0, begin, count).unsqueeze(1); };
    const Tensor softmax = rows.to(wide_type(logits)).sub(piece(of.sums).to(wide_type(logits))).exp_();
    softmax.mul_(piece(of.counted)).scatter_add_(1, piece(column), piece(one));
    rows.copy_(softmax);
  });
}

}  // namespace bonfire
