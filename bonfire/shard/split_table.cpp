#include "bonfire/shard/split_table.h"

#include <numeric>
#include <string_view>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// * stands for any letters, none among them.
bool fits(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*')
    return !name.empty() && pattern.front() == name.front() && fits(pattern.substr(1), name.substr(1));
  for (std::size_t at = 0; at <= name.size(); ++at)
    if (fits(pattern.substr(1), name.substr(at))) return true;
  return false;
}

const SplitRule* rule_for(const std::vector<SplitRule>& rules, const std::string& name) {
  for (const auto& rule : rules)
    if (fits(rule.match, name)) return rule.split == Split::whole ? nullptr : &rule;
  return nullptr;
}

// The boxes of a tensor of this shape that rank `part.rank` has.
std::vector<Box> boxes_of(const SplitRule& rule, const Shape& shape, const plan::TensorPart& part) {
  const std::size_t dim = rule.split == Split::columns ? 1 : 0;
  std::vector<Box> boxes;
  std::int64_t before = 0;
  for (const std::int64_t count : rule.parts.empty() || dim == 1 ? std::vector{shape[dim]} : rule.parts) {
    auto& box = boxes.emplace_back(whole_box(shape));
    box.begin[dim] = before + part.begin(count);
    box.end[dim] = before + part.end(count);
    before += count;
  }
  return boxes;
}

}  // namespace

SplitTable::SplitTable(const Mesh& mesh, std::vector<SplitRule> rules, bool sequence)
    : rules_(std::move(rules)), ranks_{.group = mesh.group(Axis::tensor), .sequence = sequence} {}

at::Tensor SplitTable::own(const std::string& name, const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  const auto* const rule = rule_for(rules_, name);
  if (!rule) return whole.clone();
  const std::int64_t ranks = ranks_.group.size();
  const bool columns = rule->split == Split::columns;
  if (whole.dim() < (columns ? 2 : 1))
    fail_config("parameter '{}' has {} dimensions; allowed for its split: {} or more", name, whole.dim(), columns ? 2 : 1);
  const auto sizes = rule->parts.empty() || columns ? std::vector{whole.size(columns ? 1 : 0)} : rule->parts;
  for (const std::int64_t count : sizes)
    if (count % ranks != 0)
      fail_config("parameter '{}': {} {} over {} ranks; allowed: a multiple of {}", name, count,
                  columns ? "columns" : "rows", ranks, ranks);
  const auto together = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (together != whole.size(columns ? 1 : 0))
    fail_config("parameter '{}' has {} rows, its rule's parts {}; allowed: as many", name, whole.size(0), together);
  std::vector<at::Tensor> pieces;
  for (const auto& box :
       boxes_of(*rule, whole.sizes().vec(), {.rank = ranks_.group.rank(), .ranks = static_cast<int>(ranks)})) {
    at::Tensor piece = whole;
    for (std::int64_t dim = 0; dim < whole.dim(); ++dim) {
      const auto at = static_cast<std::size_t>(dim);
      piece = piece.narrow(dim, box.begin[at], box.end[at] - box.begin[at]);
    }
    pieces.push_back(piece);
  }
  return at::cat(pieces);
}

std::function<plan::Placement(const std::string& name, const at::Tensor& own)> SplitTable::placement() const {
  return [rules = rules_, rank = ranks_.group.rank(), ranks = ranks_.group.size()](
             const std::string& name, const at::Tensor& own) -> plan::Placement {
    const auto* const rule = rule_for(rules, name);
    if (!rule) return {};
    auto shape = own.sizes().vec();
    shape[rule->split == Split::columns ? 1 : 0] *= ranks;
    auto boxes = boxes_of(*rule, shape, {.rank = rank, .ranks = ranks});
    return {.shape = std::move(shape), .boxes = std::move(boxes)};
  };
}

}  // namespace bonfire
