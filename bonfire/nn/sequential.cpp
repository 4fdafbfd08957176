#include "bonfire/nn/sequential.h"

#include <unordered_map>

#include <c10/util/Type.h>

namespace bonfire {
namespace {

// Stands in a Sequential's list of what it calls; the child itself stays in the list of children, so that nothing but the
// call goes through here.
class ChildSeam : public torch::nn::Module, public UnitSeam {
 public:
  ChildSeam(std::string name, torch::nn::AnyModule child)
      : name_(std::move(name)), child_(std::move(child)), module_(*child_.ptr()) {
    announce(*this);
  }

  torch::nn::Module& module() override { return module_; }
  const std::type_info& marked_type() const override { return typeid(module_); }

  at::Tensor forward(at::Tensor x) {
    if (hooks().empty()) [[likely]]
      return call(std::move(x));
    const auto inner = [this](at::Tensor&& passed) { return call(std::move(passed)); };
    return detail::pass_seam<at::Tensor, decltype(inner), at::Tensor>(*this, inner,
                                                                      detail::Argument<at::Tensor>(std::move(x)));
  }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>&) const override {
    fail("child '{}' ({}) of a Sequential is a Unit and cannot be cloned; build it a second time", name_, type_name());
  }

 private:
  at::Tensor call(at::Tensor&& x) {
    auto result = child_.any_forward(std::move(x));
    auto* const tensor = result.try_get<at::Tensor>();
    require(tensor, "child '{}' ({}) of a Sequential is wrapped and returned {}; allowed: a tensor", name_, type_name(),
            c10::demangle(result.type_info().name()));
    return std::move(*tensor);
  }

  std::string name_;
  torch::nn::AnyModule child_;
  torch::nn::Module& module_;
};

// AnyModule does not tell what its forward takes, except in what it throws before it calls a forward with something else.
bool takes_one_tensor(torch::nn::AnyModule& child) {
  struct Probe {};
  try {
    child.any_forward(Probe{});
  } catch (const c10::Error& error) {
    return std::string(error.what_without_backtrace()).find("argument #0 to be of type at::Tensor,") != std::string::npos;
  }
  return false;
}

}  // namespace

int wrap_children(torch::nn::SequentialImpl& sequence,
                  const std::function<bool(const std::string& name, torch::nn::Module& child)>& predicate) {
  std::unordered_map<const torch::nn::Module*, std::string> names;
  for (const auto& child : sequence.named_children()) names.emplace(child.value().get(), child.key());

  // A child that is called twice is one Unit. Every child is checked before any is wrapped.
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<ChildSeam>> seams;
  std::vector<std::pair<torch::nn::AnyModule*, torch::nn::Module*>> chosen;
  for (auto& called : sequence) {
    const auto child = called.ptr();
    if (unit_of(*child) || child->parameters().empty()) continue;
    const auto& name = names.at(child.get());
    if (predicate && !predicate(name, *child)) continue;
    if (!takes_one_tensor(called))
      fail_config("child '{}' ({}) of a Sequential cannot be wrapped: its forward takes something else than one tensor",
                  name, short_type_name(typeid(*child)));
    chosen.emplace_back(&called, child.get());
  }
  for (auto& [called, child] : chosen) {
    auto& seam = seams[child];
    if (!seam) seam = std::make_shared<ChildSeam>(names.at(child), *called);
    *called = torch::nn::AnyModule(seam);
  }
  return static_cast<int>(seams.size());
}

UnitSeam* unit_of(torch::nn::Module& child, torch::nn::Module& parent) {
  if (UnitSeam* const unit = unit_of(child)) return unit;
  if (auto* const sequence = dynamic_cast<torch::nn::SequentialImpl*>(&parent))
    for (const auto& called : *sequence)
      if (UnitSeam* const unit = unit_of(*called.ptr()); unit && &unit->module() == &child) return unit;
  return nullptr;
}

}  // namespace bonfire
