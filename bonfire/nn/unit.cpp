#include "bonfire/nn/unit.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/util/Type.h>

namespace bonfire {
namespace {

thread_local ObserveUnits* innermost = nullptr;

}  // namespace

UnitSeam::~UnitSeam() = default;

std::string UnitSeam::type_name() const { return short_type_name(marked_type()); }

// "a::Outer<b::C>::BlockImpl" is "Block".
std::string short_type_name(const std::type_info& type) {
  const std::string name = c10::demangle(type.name());
  std::size_t begin = 0;
  int depth = 0;
  for (std::size_t at = 0; at < name.size(); ++at) {
    const char c = name[at];
    if (c == '<' || c == '(') ++depth;
    if (c == '>' || c == ')') --depth;
    if (c == ':' && depth == 0) begin = at + 1;
  }
  std::string last = name.substr(begin);
  const auto end = std::min(last.find('<'), last.size());
  constexpr std::string_view impl = "Impl";
  if (end > impl.size() && last.compare(end - impl.size(), impl.size(), impl) == 0)
    last.erase(end - impl.size(), impl.size());
  return last;
}

UnitSeam* unit_of(torch::nn::Module& module) { return dynamic_cast<UnitSeam*>(&module); }

ObserveUnits::ObserveUnits(UnitObserver& observer) : observer_(observer), outer_(innermost) { innermost = this; }

ObserveUnits::~ObserveUnits() { innermost = outer_; }

void announce(UnitSeam& unit) {
  if (innermost) innermost->observer_.constructed(unit);
}

std::vector<at::Tensor> UnitHook::around(UnitCall& call, std::vector<at::Tensor> inputs) {
  before_forward(call.unit(), inputs);
  std::vector<at::Tensor> outputs;
  try {
    outputs = call.run(std::move(inputs));
  } catch (...) {
    forward_failed(call.unit());
    throw;
  }
  after_forward(call.unit(), outputs);
  return outputs;
}

void UnitHooks::add(UnitHook& hook) {
  auto longer = hooks_ ? std::make_shared<std::vector<UnitHook*>>(*hooks_) : std::make_shared<std::vector<UnitHook*>>();
  auto place = longer->end();
  while (!hook.innermost() && place != longer->begin() && (*std::prev(place))->innermost()) --place;
  longer->insert(place, &hook);
  hooks_ = std::move(longer);
}

void UnitHooks::remove(const UnitHook& hook) {
  if (!hooks_) return;
  auto shorter = std::make_shared<std::vector<UnitHook*>>(*hooks_);
  std::erase(*shorter, &hook);
  hooks_ = std::move(shorter);
  if (hooks_->empty()) hooks_.reset();
}

std::vector<at::Tensor> UnitCall::run(std::vector<at::Tensor> inputs) {
  if (next_ == hooks_->size()) return ++next_, forward(std::move(inputs));
  require(next_ < hooks_->size(), "a hook of Unit {} ran it twice: use UnitCall::repeatable", unit_.type_name());
  return (*hooks_)[next_++]->around(*this, std::move(inputs));
}

void detail::fail_to_keep(const UnitSeam& unit, const std::type_info& pointer) {
  std::string type = c10::demangle(pointer.name());
  type.pop_back();
  fail(
      "the forward of Unit {} cannot be run again: it takes a {}; allowed: tensors, numbers, strings, and containers of "
      "them",
      unit.type_name(), type);
}

at::Tensor detail::placeholder() { return at::empty({0}); }

void detail::require_same_count(const UnitSeam& unit, std::size_t seen, std::size_t given_back) {
  require(seen == given_back, "the hooks of Unit {} were given {} tensors and gave back {}: replace tensors in their places",
          unit.type_name(), seen, given_back);
}

}  // namespace bonfire
