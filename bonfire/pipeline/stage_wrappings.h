#pragma once

#include <map>

#include <c10/core/Device.h>

#include "bonfire/comm/group.h"
#include "bonfire/shard/wrap.h"

namespace bonfire {

// The wrapping of each of this rank's stages. What it names may be on any stage of the model: each stage is left with the
// names that it has. Throws ConfigError, the same on all ranks, for a name that no stage has. Collective along `pipeline`.
std::map<int, Wrapping> wrappings_of_stages(const Group& pipeline, const std::map<int, torch::nn::Module*>& modules,
                                            const Wrapping& wrapping, c10::Device device);

}  // namespace bonfire
