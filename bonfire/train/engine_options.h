#pragma once

#include <memory>

#include "bonfire/base/log.h"
#include "bonfire/comm/world.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "bonfire/train/config.h"

// What a configuration says of an engine and its optimizer. REQUIRES: it is resolved.
namespace bonfire {

// `tensor_rank`: the place along the tensor axis of the rank that they are for.
ShardOptions engine_options(const Config& config, const Log& log, int tensor_rank = 0);
// Tells a model, or a part of one, what its blocks multiply in (train.precision) and keep (train.keep_for_backward).
void prepare_blocks(Model& model, const Config& config);
// How this rank builds its part of the model.
BuildOptions build_options(const Config& config, const World& world, const Mesh& mesh);
// Whether fault.nan_rank spoils this rank's loss: the ranks that split the layers have one loss.
bool has_faulty_loss(const Config& config, const World& world);
std::unique_ptr<Optimizer> make_optimizer(Shares& shares, const Config& config);

}  // namespace bonfire
