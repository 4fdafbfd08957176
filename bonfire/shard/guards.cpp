#include "bonfire/shard/guards.h"

#include <set>

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/nn/unit.h"

namespace bonfire {
namespace {

// As its author calls it, where the root is marked.
std::string type_of(const std::vector<ModuleGroup>& groups, const std::string& otherwise) {
  for (const auto& group : groups)
    if (group.name.empty() && group.unit) return group.unit->type_name();
  return otherwise;
}

}  // namespace

void require_on_device(const Group& group, const std::string& name, const at::Tensor& parameter) {
  const auto here = group.state().device, its = parameter.device();
  // A rank alone on the CPU sends nothing to anybody, so its module may be anywhere.
  if (here.is_cpu() && group.size() == 1) return;
  if (here.type() == its.type() && (!here.has_index() || !its.has_index() || here.index() == its.index())) return;
  fail_config("parameter '{}' is on {}, but this rank computes on {}: call model->to(world.device()) before shard()", name,
              its.str(), here.str());
}

void warn_of_unmarked(torch::nn::Module& module, const std::vector<ModuleGroup>& groups, const ShardOptions& options) {
  if (options.wrapping.all_in_one) return;
  std::int64_t all = 0, unmarked = 0;
  std::set<std::string> parts;  // of the root that are no Units, by path
  for (const auto& group : groups)
    for (const auto& member : group.members) {
      const auto bytes = static_cast<std::int64_t>(member.parameter.nbytes());
      all += bytes;
      if (!group.name.empty()) continue;
      unmarked += bytes;
      if (const auto dot = member.name.rfind('.'); dot != std::string::npos) parts.insert(member.name.substr(0, dot));
    }
  // What is left to the root is little where a model's blocks are marked.
  if (parts.size() < 2 || 2 * unmarked <= all) return;
  const auto root = module.name();
  const std::string what = unmarked == all
                               ? fmt::format("the whole model ({}) is one Unit: a step gathers all of its {} of parameters",
                                             type_of(groups, root), format_bytes(all))
                               : fmt::format(
                                     "{} of the model's {} of parameters lie outside of any Unit but the root ({}): a "
                                     "step gathers them",
                                     format_bytes(unmarked), format_bytes(all), type_of(groups, root));
  options.log.warning(
      "{} at once, so sharding them saves memory only between steps; declare the model's blocks with BONFIRE_UNIT(Block) in "
      "place "
      "of TORCH_MODULE(Block)",
      what);
}

}  // namespace bonfire
