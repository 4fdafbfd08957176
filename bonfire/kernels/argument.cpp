#include "bonfire/kernels/argument.h"

#include <string>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

std::string shown(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += size == any_size ? "any" : std::to_string(size);
  }
  return text + "]";
}

std::string shown(const at::Tensor& x) {
  if (!x.defined()) return "undefined";
  return fmt::format("{} {} on {}", c10::toString(x.scalar_type()), shown(x.sizes()), x.device().str());
}

bool fits(at::IntArrayRef got, at::IntArrayRef allowed) {
  if (got.size() != allowed.size()) return false;
  for (std::size_t i = 0; i < got.size(); ++i)
    if (allowed[i] != any_size && got[i] != allowed[i]) return false;
  return true;
}

}  // namespace

void require_sizes(const Argument& a, at::IntArrayRef sizes, const at::Tensor& beside) {
  if (a.tensor.defined() && fits(a.tensor.sizes(), sizes) && a.tensor.device() == beside.device()) [[likely]]
    return;
  fail("{}: {} is {}; allowed beside {}: {} on the same device", a.op, a.name, shown(a.tensor), shown(beside), shown(sizes));
}

void require_alike(const Argument& a, const at::Tensor& beside) {
  if (a.tensor.defined() && a.tensor.sizes() == beside.sizes() && a.tensor.device() == beside.device() &&
      a.tensor.scalar_type() == beside.scalar_type()) [[likely]]
    return;
  fail("{}: {} is {}; allowed: {}", a.op, a.name, shown(a.tensor), shown(beside));
}

void require_rows(const Argument& a) {
  if (a.tensor.defined() && a.tensor.dim() >= 1) [[likely]]
    return;
  fail("{}: {} is {}; allowed: one dimension or more", a.op, a.name, shown(a.tensor));
}

void require_integers(const Argument& a) {
  if (a.tensor.defined() && at::isIntegralType(a.tensor.scalar_type(), /*includeBool=*/false)) [[likely]]
    return;
  fail("{}: {} is {}; allowed: whole numbers, as int64", a.op, a.name, shown(a.tensor));
}

void require_contiguous(const Argument& a) {
  if (a.tensor.defined() && a.tensor.is_contiguous()) [[likely]]
    return;
  fail("{}: {} is {}, not contiguous; allowed: contiguous memory", a.op, a.name, shown(a.tensor));
}

std::int64_t require_halves(const Argument& a) {
  require_rows(a);
  if (a.tensor.size(-1) % 2 != 0)
    fail("{}: {} is {}; allowed: an even last dimension, as many gates as ups", a.op, a.name, shown(a.tensor));
  return a.tensor.size(-1) / 2;
}

}  // namespace bonfire
