#include "bonfire/shard/guards.h"

#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/nn/unit.h"

namespace bonfire {

void require_on_device(const Group& group, const std::string& name, const at::Tensor& parameter) {
  const auto here = group.state().device, its = parameter.device();
  // A rank alone on the CPU sends nothing to anybody, so its module may be anywhere.
  if (here.is_cpu() && group.size() == 1) return;
  if (here.type() == its.type() && (!here.has_index() || !its.has_index() || here.index() == its.index())) return;
  fail_config("parameter '{}' is on {}, but this rank computes on {}: call model->to(world.device()) before shard()", name,
              its.str(), here.str());
}

void warn_of_one_unit(torch::nn::Module& module, const std::vector<ModuleGroup>& groups, const ShardOptions& options) {
  if (groups.size() != 1 || options.wrapping.all_in_one || module.modules(/*include_self=*/false).size() < 2) return;
  std::int64_t bytes = 0;
  for (const auto& member : groups.front().members) bytes += static_cast<std::int64_t>(member.parameter.nbytes());
  options.log.warning(
      "the whole model ({}) is one Unit: a step gathers all of its {} of parameters at once, so sharding them saves memory "
      "only between steps; declare its blocks with BONFIRE_UNIT(Block) in place of TORCH_MODULE(Block)",
      groups.front().unit->type_name(), format_bytes(bytes));
}

}  // namespace bonfire
