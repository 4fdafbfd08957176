#include "bonfire/shard/powersgd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/random.h"

namespace bonfire {
namespace {

// Gram-Schmidt over the columns. A column that has nothing left of its own becomes zero and carries nothing.
void orthogonalize(at::Tensor matrix) {
  for (std::int64_t at = 0; at < matrix.size(1); ++at) {
    auto column = matrix.select(1, at);
    for (std::int64_t before = 0; before < at; ++before) {
      const auto other = matrix.select(1, before);
      column.sub_(other.mul(other.dot(column)));
    }
    column.div_(column.norm().add_(1e-30));
  }
}

// The same on every rank and in every run.
void fill_start(at::Tensor right, std::size_t bucket, std::size_t segment) {
  const Random random = Random(0x706f776572).fork(bucket).fork(segment);
  auto values = at::empty(right.sizes(), at::kDouble);
  auto* data = values.data_ptr<double>();
  for (std::int64_t at = 0; at < values.numel(); ++at) data[at] = random.normal(static_cast<std::uint64_t>(at));
  right.copy_(values);
}

}  // namespace

PowerSgd::Bucket& PowerSgd::prepare(std::size_t index, const FlatParameter& flat) {
  if (buckets_.size() <= index) buckets_.resize(index + 1);
  auto& bucket = buckets_[index];
  if (bucket.left.defined()) return bucket;

  std::int64_t left = 0, right = 0;
  const auto& segments = flat.layout().segments;
  for (std::size_t at = 0; at < segments.size() && flat.layout().trained(at); ++at) {
    const auto low = plan::low_rank(flat.parameters()[at].sizes().vec(), rank_);
    left += low.rank ? low.rows * low.rank : segments[at].elements;
    right += low.columns * low.rank;
  }
  bucket.left = at::zeros({left}, flat.gradient(0).options());
  bucket.right = at::zeros({right}, flat.gradient(0).options());
  left = right = 0;
  for (std::size_t at = 0; at < segments.size() && flat.layout().trained(at); ++at) {
    const auto low = plan::low_rank(flat.parameters()[at].sizes().vec(), rank_);
    if (low.rank == 0) {
      bucket.plains.push_back({at, bucket.left.narrow(0, left, segments[at].elements)});
      left += segments[at].elements;
      continue;
    }
    auto& matrix = bucket.matrices.emplace_back();
    matrix.segment = at;
    matrix.size = low;
    matrix.left = bucket.left.narrow(0, left, low.rows * low.rank).view({low.rows, low.rank});
    matrix.right = bucket.right.narrow(0, right, low.columns * low.rank).view({low.columns, low.rank});
    matrix.error = at::zeros({low.rows, low.columns}, flat.gradient(0).options());
    fill_start(matrix.right, index, at);
    left += low.rows * low.rank;
    right += low.columns * low.rank;
  }
  return bucket;
}

void PowerSgd::begin(std::size_t index, FlatParameter& flat) {
  const at::NoGradGuard no_grad;
  auto& bucket = prepare(index, flat);
  for (auto& matrix : bucket.matrices) {
    auto gradient = flat.gradient_view(matrix.segment).view({matrix.size.rows, matrix.size.columns});
    gradient.add_(matrix.error);
    orthogonalize(matrix.right);
    at::mm_out(matrix.left, gradient, matrix.right);
  }
  for (auto& plain : bucket.plains) plain.travelling.copy_(flat.gradient_view(plain.segment).view(-1));
  bucket.work = replicas_.all_reduce(bucket.left, Reduce::average);
}

void PowerSgd::advance(std::size_t index, FlatParameter& flat) {
  const at::NoGradGuard no_grad;
  auto& bucket = buckets_.at(index);
  bucket.work.wait();
  for (auto& plain : bucket.plains) flat.gradient_view(plain.segment).view(-1).copy_(plain.travelling);
  bucket.work = {};
  if (bucket.matrices.empty()) return;
  for (auto& matrix : bucket.matrices) {
    const auto gradient = flat.gradient_view(matrix.segment).view({matrix.size.rows, matrix.size.columns});
    orthogonalize(matrix.left);
    at::mm_out(matrix.right, gradient.t(), matrix.left);
  }
  bucket.work = replicas_.all_reduce(bucket.right, Reduce::average);
}

void PowerSgd::end(std::size_t index, FlatParameter& flat) {
  const at::NoGradGuard no_grad;
  auto& bucket = buckets_.at(index);
  bucket.work.wait();
  for (auto& matrix : bucket.matrices) {
    auto gradient = flat.gradient_view(matrix.segment).view({matrix.size.rows, matrix.size.columns});
    const auto sent = at::mm(matrix.left, matrix.right.t());
    at::sub_out(matrix.error, gradient, sent);
    gradient.copy_(sent);
  }
}

std::vector<Reduction::Carried> PowerSgd::carried(std::size_t index, const FlatParameter& flat) {
  std::vector<Carried> all;
  if (flat.trained().empty()) return all;
  for (const auto& matrix : prepare(index, flat).matrices) {
    all.push_back({.segment = matrix.segment, .name = "powersgd_error", .values = matrix.error, .of_each_rank = true});
    all.push_back({.segment = matrix.segment, .name = "powersgd_right", .values = matrix.right});
  }
  return all;
}

void PowerSgd::spent(const GradientUse& use) {
  // What is not finite would never leave the error again: after a dropped step everything starts afresh.
  if (!use.applied) return buckets_.clear();
  if (use.rescaled == 1) return;
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_)
    for (auto& matrix : bucket.matrices) matrix.error.mul_(use.rescaled);
}

}  // namespace bonfire
