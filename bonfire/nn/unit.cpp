#include "bonfire/nn/unit.h"

#include <algorithm>
#include <string_view>

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

void detail::require_same_count(const UnitSeam& unit, std::size_t seen, std::size_t given_back) {
  require(seen == given_back, "the hooks of Unit {} were given {} tensors and gave back {}: replace tensors in their places",
          unit.type_name(), seen, given_back);
}

}  // namespace bonfire
