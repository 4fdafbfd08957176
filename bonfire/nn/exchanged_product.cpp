#include "bonfire/nn/exchanged_product.h"

#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/product.h"

namespace bonfire {
namespace {

using at::Tensor;

std::vector<std::int64_t> of_width(const Tensor& x, std::int64_t last) {
  auto sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

Tensor flat_rows(const Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// `to` = rows b + bias, for as many rows as `to` has in whatever form.
void multiply_into(const Tensor& to, const Tensor& rows, const Tensor& b, const Tensor& bias) {
  if (!to.is_contiguous()) {
    to.copy_(product(rows, b, {.bias = bias}).view(to.sizes()));
    return;
  }
  product_into(to.view({rows.size(0), b.size(1)}), rows, b, Writing::overwrite);
  if (bias.defined()) to.add_(bias);
}

// Without a split sequence: any rows are a chunk.
Tensor all_reduced_product(const Tensor& x, const Tensor& b, const TensorRanks& ranks) {
  const Tensor rows = flat_rows(x), out = at::empty({rows.size(0), b.size(1)}, x.options());
  const std::int64_t count = std::min<std::int64_t>(ranks.chunks, rows.size(0));
  std::vector<Work> sums;
  for (std::int64_t chunk = 0; chunk < count; ++chunk) {
    const std::int64_t begin = rows.size(0) * chunk / count, end = rows.size(0) * (chunk + 1) / count;
    const Tensor part = out.narrow(0, begin, end - begin);
    product_into(part, rows.narrow(0, begin, end - begin), b, Writing::overwrite);
    sums.push_back(ranks.group.all_reduce(part));
  }
  for (auto& sum : sums) sum.wait();
  return out.view(of_width(x, b.size(1)));
}

}  // namespace

GatheredProduct gathered_product(const Tensor& x, const Tensor& b, const GatheredOptions& options,
                                 const TensorRanks& ranks) {
  GatheredProduct made;
  if (ranks.chunks <= 1 || !ranks.sequence || !ranks.split()) {
    made.read = Gathering(ranks, x).finish();
    made.out = product(flat_rows(made.read), b, {.bias = options.bias}).view(of_width(made.read, b.size(1)));
    return made;
  }
  const SequenceChunks chunks(ranks, x, x.size(1));
  std::vector<Gathering> coming;
  for (int chunk = 0; chunk < chunks.count(); ++chunk) coming.emplace_back(ranks, chunks.of_own(x, chunk));
  auto sizes = x.sizes().vec();
  sizes[1] *= ranks.group.size();
  if (options.keep_read) made.read = at::empty(sizes, x.options());
  sizes[2] = b.size(1);
  made.out = at::empty(sizes, x.options());
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    const Tensor part = coming[static_cast<std::size_t>(chunk)].finish();
    if (made.read.defined()) {
      const Tensor place = chunks.of_all(made.read, chunk);
      place.copy_(part.view(place.sizes()));
    }
    multiply_into(chunks.of_all(made.out, chunk), flat_rows(part), b, options.bias);
  }
  return made;
}

Tensor summed_product(const Tensor& x, const Tensor& b, const TensorRanks& ranks) {
  if (ranks.chunks <= 1 || !ranks.split())
    return Summing(ranks, product(flat_rows(x), b).view(of_width(x, b.size(1)))).finish();
  if (!ranks.sequence) return all_reduced_product(x, b, ranks);
  require(x.size(1) % ranks.group.size() == 0, "a sequence of {} positions over {} ranks; allowed: a multiple of {}",
          x.size(1), ranks.group.size(), ranks.group.size());
  const SequenceChunks chunks(ranks, x, x.size(1) / ranks.group.size());
  std::vector<Summing> sums;
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    const Tensor part = chunks.of_all(x, chunk);
    sums.emplace_back(ranks, product(flat_rows(part), b).view({part.size(0), part.size(1) * part.size(2), b.size(1)}));
  }
  const Tensor out = at::empty({x.size(0), x.size(1) / ranks.group.size(), b.size(1)}, x.options());
  for (int chunk = 0; chunk < chunks.count(); ++chunk)
    chunks.of_own(out, chunk).copy_(sums[static_cast<std::size_t>(chunk)].finish());
  return out;
}

}  // namespace bonfire
