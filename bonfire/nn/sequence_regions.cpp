#include "bonfire/nn/sequence_regions.h"

#include <algorithm>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/nn/dropout_state.h"

namespace bonfire {

using at::Tensor;
using torch::autograd::variable_list;

SequenceChunks::SequenceChunks(const TensorRanks& ranks, const Tensor& x, std::int64_t own_positions)
    : ranks_(ranks.sequence ? ranks.group.size() : 1),
      batch_(x.size(0)),
      own_(own_positions),
      by_samples_(batch_ >= ranks.chunks) {
  count_ =
      static_cast<int>(std::clamp<std::int64_t>(ranks.chunks, 1, std::max<std::int64_t>(1, by_samples_ ? batch_ : own_)));
}

Tensor SequenceChunks::of_own(const Tensor& x, int chunk) const {
  const std::int64_t size = by_samples_ ? batch_ : own_, begin = size * chunk / count_, end = size * (chunk + 1) / count_;
  return x.narrow(by_samples_ ? 0 : 1, begin, end - begin);
}

Tensor SequenceChunks::of_all(const Tensor& x, int chunk) const {
  const std::int64_t size = by_samples_ ? batch_ : own_, begin = size * chunk / count_, end = size * (chunk + 1) / count_;
  return x.view({batch_, ranks_, own_, x.size(2)}).narrow(by_samples_ ? 0 : 2, begin, end - begin);
}

Gathering::Gathering(const TensorRanks& ranks, Tensor part) : part_(std::move(part)) {
  if (!ranks.sequence || !ranks.split()) return;
  part_ = part_.contiguous();
  auto sizes = part_.sizes().vec();
  sizes.insert(sizes.begin(), ranks.group.size());
  all_ = at::empty(sizes, part_.options());
  work_ = ranks.group.all_gather(all_, part_);
}

Tensor Gathering::finish() {
  work_.wait();
  if (!all_.defined()) return std::move(part_);
  part_.reset();
  // From [ranks, batch, part, width]: with one sample the parts lie in order.
  const Tensor all = std::move(all_);
  return all.transpose(0, 1).reshape({all.size(1), all.size(0) * all.size(2), all.size(3)});
}

Summing::Summing(const TensorRanks& ranks, Tensor partial) : partial_(std::move(partial)) {
  if (!ranks.split()) {
    out_ = partial_;
  } else if (!ranks.sequence) {
    out_ = partial_;
    work_ = ranks.group.all_reduce(out_);
  } else {
    const std::int64_t parts = ranks.group.size(), batch = partial_.size(0), width = partial_.size(2);
    require(partial_.size(1) % parts == 0, "a sequence of {} positions over {} ranks; allowed: a multiple of {}",
            partial_.size(1), parts, parts);
    partial_ = partial_.view({batch, parts, partial_.size(1) / parts, width}).transpose(0, 1).contiguous();
    out_ = at::empty({batch, partial_.size(2), width}, partial_.options());
    work_ = ranks.group.reduce_scatter(out_, partial_);
  }
}

Tensor Summing::finish() {
  work_.wait();
  partial_.reset();
  return std::move(out_);
}

Tensor summed_gradient(const TensorRanks& ranks, const Tensor& gradient) {
  if (!ranks.sequence || !gradient.defined()) return gradient;
  const Tensor sum = gradient.contiguous();
  ranks.group.all_reduce(sum).wait();
  return sum;
}

namespace {

struct SumNode : BackwardNode {
  TensorRanks ranks;
  std::vector<std::int64_t> positions;  // sizes; empty: there are none
  at::ScalarType positions_type = at::kFloat;
  Tensor places;

  // Known as a layer with a parameter, so that the halves of a split backward do not gather once each.
  std::vector<std::size_t> parameters() const override {
    return positions.empty() ? std::vector<std::size_t>{} : std::vector<std::size_t>{1};
  }

  variable_list backward(const variable_list& gradients) override {
    const Tensor d = Gathering(ranks, gradients[0]).finish();
    variable_list out(num_outputs());
    if (task_should_compute_output(0)) out[0] = d;
    if (!positions.empty() && wants(1)) give(out, 1, [made = of_positions(d)] { return made; });
    return out;
  }

 private:
  Tensor of_positions(const Tensor& d) const {
    const bool of_samples = places.defined() && places.dim() == 2;
    const Tensor sum = of_samples ? d.flatten(0, 1) : d.sum(0);
    const auto wide = positions_type == at::kDouble ? at::kDouble : at::kFloat;
    Tensor made = at::zeros(positions, sum.options().dtype(wide));
    if (places.defined())
      made.index_add_(0, places.flatten(), sum.to(wide));
    else
      made.narrow(0, 0, sum.size(0)).copy_(sum);
    return made.to(positions_type);
  }
};

struct GatheredColumnsNode : BackwardNode {
  std::int64_t begin = 0, count = 0;
  variable_list backward(const variable_list& gradients) override {
    return {gradients[0].narrow(-1, begin, count).contiguous()};
  }
};

// Before anything is exchanged.
void require_positions(const Tensor& partial, const Tensor& positions, const Tensor& places) {
  if (!positions.defined()) return;
  require_sizes({"sum_of_parts", "partial", partial}, {any_size, any_size, any_size}, partial);
  require_sizes({"sum_of_parts", "positions", positions}, {any_size, partial.size(2)}, partial);
  if (!places.defined()) {
    require(partial.size(1) <= positions.size(0), "the sequence has {} tokens; the model knows {} positions",
            partial.size(1), positions.size(0));
    return;
  }
  if (places.dim() == 2)
    require_sizes({"sum_of_parts", "places", places}, {partial.size(0), partial.size(1)}, partial);
  else
    require_sizes({"sum_of_parts", "places", places}, {partial.size(1)}, partial);
}

Tensor sum_and_add(const Tensor& partial, const Tensor& positions, const Tensor& places, const TensorRanks& ranks) {
  require_positions(partial, positions, places);
  auto node = node_behind<SumNode>({partial, positions});
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Autograd may still hold what was given.
    out = Summing(ranks, partial.clone()).finish();
    if (positions.defined()) {
      const std::int64_t own = out.size(1), begin = ranks.sequence ? ranks.group.rank() * own : 0;
      if (places.defined()) {
        const Tensor here = places.narrow(-1, begin, own);
        auto sizes = here.sizes().vec();
        sizes.push_back(positions.size(1));
        out.add_(positions.index_select(0, here.flatten()).view(sizes));
      } else {
        out.add_(positions.narrow(0, begin, own));
      }
    }
  }
  if (!node) return out;
  node->ranks = ranks;
  if (positions.defined()) {
    node->positions = positions.sizes().vec();
    node->positions_type = positions.scalar_type();
    node->places = places;
  }
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace

Tensor sum_of_parts(const Tensor& partial, const TensorRanks& ranks) { return sum_and_add(partial, {}, {}, ranks); }
Tensor sum_of_parts(const Tensor& partial, const Tensor& positions, const TensorRanks& ranks) {
  return sum_and_add(partial, positions, {}, ranks);
}
Tensor sum_of_parts(const Tensor& partial, const Tensor& positions, const Tensor& places, const TensorRanks& ranks) {
  return sum_and_add(partial, positions, places, ranks);
}

Tensor gather_columns(const Tensor& own, std::int64_t columns, const TensorRanks& ranks) {
  auto node = node_behind<GatheredColumnsNode>({own});
  const std::int64_t parts = ranks.group.size(), rank = ranks.group.rank();
  const auto begin = [&](std::int64_t of) { return columns * of / parts; };
  require(own.size(-1) == begin(rank + 1) - begin(rank), "gather_columns: {} columns on rank {} of {}; allowed of {}: {}",
          own.size(-1), rank, parts, columns, begin(rank + 1) - begin(rank));
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Parts may differ by a column, which is sent as one more.
    const std::int64_t most = (columns + parts - 1) / parts;
    const Tensor rows = own.reshape({-1, own.size(-1)});
    Tensor padded = at::zeros({rows.size(0), most}, rows.options());
    padded.narrow(1, 0, rows.size(1)).copy_(rows);
    const Tensor all = at::empty({parts, rows.size(0), most}, rows.options());
    ranks.group.all_gather(all, padded).wait();
    std::vector<Tensor> pieces;
    for (std::int64_t at = 0; at < parts; ++at) pieces.push_back(all[at].narrow(1, 0, begin(at + 1) - begin(at)));
    auto sizes = own.sizes().vec();
    sizes.back() = columns;
    out = at::cat(pieces, 1).view(sizes);
  }
  if (!node) return out;
  node->begin = begin(rank);
  node->count = own.size(-1);
  torch::autograd::set_history(out, node);
  return out;
}

Tensor Dropout::of_part(const Tensor& x, std::int64_t begin, std::int64_t positions) const {
  if (!active()) return x;
  const std::int64_t width = x.size(2), in_sample = positions * state_->context.ranks;
  const Random random = state_->seed.fork(place_).fork(state_->step);
  const auto stretches = stretches_of(state_->context, positions, begin, x.size(1));
  std::vector<Tensor> samples;
  for (std::int64_t at = 0; at < x.size(0); ++at) {
    std::vector<Tensor> pieces;
    for (const auto& stretch : stretches)
      pieces.push_back(
          dropout(x.narrow(0, at, 1).narrow(1, stretch.own - begin, stretch.count),
                  {.p = p_, .random = random, .first = ((state_->first_sample + at) * in_sample + stretch.place) * width}));
    samples.push_back(pieces.size() == 1 ? pieces.front() : at::cat(pieces, 1));
  }
  return at::cat(samples);
}

}  // namespace bonfire
