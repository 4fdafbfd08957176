#include "bonfire/shard/wrap.h"

#include <map>
#include <unordered_set>
#include <utility>

#include <torch/nn/module.h>

#include "bonfire/nn/unit.h"

namespace bonfire {
namespace {

class Grouping {
 public:
  void visit(const torch::nn::Module& module, const std::string& path, std::string unit, bool inside_unit) {
    if (dynamic_cast<const UnitSeam*>(&module)) {
      unit = path;
      inside_unit = true;
    }
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto& parameter = item.value();
      if (!parameter.defined() || !parameter.is_floating_point() || !seen_.insert(parameter.unsafeGetTensorImpl()).second)
        continue;
      const std::string name = join(path, item.key());
      add(inside_unit ? unit : name, name, parameter);
    }
    for (const auto& child : module.named_children()) visit(*child.value(), join(path, child.key()), unit, inside_unit);
  }

  std::vector<ModuleGroup> take() { return std::move(groups_); }

 private:
  static std::string join(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  void add(const std::string& group, const std::string& name, const at::Tensor& parameter) {
    const auto [at, fresh] = index_.try_emplace({group, parameter.scalar_type()}, groups_.size());
    if (fresh) groups_.push_back({group, {}});
    groups_[at->second].members.push_back({name, parameter});
  }

  std::map<std::pair<std::string, at::ScalarType>, std::size_t> index_;
  std::unordered_set<const c10::TensorImpl*> seen_;
  std::vector<ModuleGroup> groups_;
};

}  // namespace

std::vector<ModuleGroup> groups_of(const torch::nn::Module& module) {
  Grouping grouping;
  grouping.visit(module, "", "", false);
  return grouping.take();
}

}  // namespace bonfire
