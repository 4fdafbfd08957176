#include "bonfire/shard/equality.h"

#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// One row of numbers per rank. REQUIRES: as many on each.
at::Tensor gather(const Group& group, const std::vector<std::int64_t>& numbers) {
  auto mine = at::tensor(numbers, at::kLong).to(group.device());
  auto all = at::empty({group.size(), mine.numel()}, mine.options());
  group.all_gather(all, mine).wait();
  return all.cpu();
}

std::int64_t hash(const void* data, std::size_t bytes) {
  const auto value = XXH3_64bits(data, bytes);
  std::int64_t number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

// Compares rank by rank with this one's row, and hands the first difference to `report(number, other rank)`.
template <class Report>
void compare_rows(const Group& group, const at::Tensor& rows, Report&& report) {
  const auto table = rows.accessor<std::int64_t, 2>();
  for (std::int64_t at = 0; at < rows.size(1); ++at)
    for (int rank = 1; rank < group.size(); ++rank)
      if (table[rank][at] != table[0][at]) report(static_cast<std::size_t>(at), rank);
}

}  // namespace

void require_same_structure(const Group& group, const std::vector<NamedTensor>& tensors) {
  compare_rows(group, gather(group, {static_cast<std::int64_t>(tensors.size())}), [&](std::size_t, int rank) {
    fail("rank {} and rank {} were given modules with different numbers of parameters; this rank has {}",
         group.world_ranks()[0], group.world_ranks()[static_cast<std::size_t>(rank)], tensors.size());
  });
  std::vector<std::int64_t> hashes;
  for (const auto& [name, tensor] : tensors) {
    const auto text = fmt::format("{} {} {}", name, c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ","));
    hashes.push_back(hash(text.data(), text.size()));
  }
  if (hashes.empty()) return;
  compare_rows(group, gather(group, hashes), [&](std::size_t at, int rank) {
    fail("parameter {} has another name, shape or dtype on rank {} than on rank {}; here it is '{}', {} [{}]", at,
         group.world_ranks()[static_cast<std::size_t>(rank)], group.world_ranks()[0], tensors[at].name,
         c10::toString(tensors[at].tensor.scalar_type()), fmt::join(tensors[at].tensor.sizes(), ", "));
  });
}

void require_same_values(const Group& group, const std::vector<NamedTensor>& tensors) {
  if (group.size() == 1 || tensors.empty()) return;
  std::vector<std::int64_t> hashes;
  for (const auto& [name, tensor] : tensors) {
    const auto host = tensor.detach().cpu().contiguous();
    hashes.push_back(hash(host.data_ptr(), host.nbytes()));
  }
  compare_rows(group, gather(group, hashes), [&](std::size_t at, int rank) {
    fail(
        "parameter '{}' differs between rank {} and rank {}; build the model from one seed, or start with rank 0's values "
        "(Start::broadcast)",
        tensors[at].name, group.world_ranks()[0], group.world_ranks()[static_cast<std::size_t>(rank)]);
  });
}

void broadcast_values(const Group& group, const std::vector<NamedTensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    const auto values = tensor.detach().contiguous();
    group.broadcast(values, 0).wait();
    if (!tensor.is_contiguous()) tensor.detach().copy_(values);
  }
}

}  // namespace bonfire
