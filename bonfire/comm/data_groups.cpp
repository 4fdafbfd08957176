#include "bonfire/comm/data_groups.h"

#include "bonfire/base/error.h"

namespace bonfire {

DataGroups::DataGroups(const Mesh& mesh) {
  if (mesh.shape().pipeline > 1)
    fail_config("mesh axis pipeline is {}: this is for ranks that have all of a module; allowed: 1", mesh.shape().pipeline);
  *this = of_stage(mesh);
}

DataGroups DataGroups::of_stage(const Mesh& mesh) {
  DataGroups groups;
  groups.all = mesh.with_context(Axis::data);
  groups.replicas = mesh.with_context(Axis::replicate);
  groups.shards = mesh.group(Axis::shard);
  groups.gathers = mesh.gathers();
  groups.splits = mesh.group(Axis::tensor);
  return groups;
}

}  // namespace bonfire
