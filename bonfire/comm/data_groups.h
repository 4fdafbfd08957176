#pragma once

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/mesh.h"

namespace bonfire {

// The ranks that train one module together, as an Engine needs them: a value. A Mesh is one, and whoever has such groups can
// make one by hand, of any ranks: no other rank of the World need take part in anything.
//
// Who reads which samples is another question. Ranks along the data axis, replicate x shard, read different ones: a rank's
// number among them is mesh.coordinate(Axis::data). Ranks along context read the same samples, of which each has its
// positions, and ranks along tensor do too. Gradients are averaged over all that have different tokens, replicate x shard x
// context: those along context hold the same part of the module, so they are replicas here. A rank's loss is the mean over
// its tokens, and the mean over `all` that of the batch.
struct BONFIRE_API DataGroups {
  DataGroups() = default;  // this rank alone
  // Those of a mesh without pipeline axis. Throws ConfigError where it has one. Implicit, so that a mesh is passed where
  // groups are asked for.
  DataGroups(const Mesh& mesh);
  // Those of this rank's stage, in a mesh with a pipeline axis.
  static DataGroups of_stage(const Mesh& mesh);

  Group all{};       // every rank that trains the module
  Group replicas{};  // those that hold the same part of it as this one
  Group shards{};    // those that one copy of it is divided over, each in its place: the same number for every copy
  Group gathers{};   // the same once more, over a communicator of its own
  Group splits{};    // those that split its layers, each with its part of them, and see the same samples
};

}  // namespace bonfire
