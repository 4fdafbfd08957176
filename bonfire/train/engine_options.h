#pragma once

#include <memory>

#include "bonfire/base/log.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "bonfire/train/config.h"

// What a configuration says of an engine and its optimizer. REQUIRES: it is resolved.
namespace bonfire {

class Model;

ShardOptions engine_options(const Config& config, const Log& log);
// Tells a model, or a part of one, what its blocks multiply in (train.precision) and keep (train.keep_for_backward).
void prepare_blocks(Model& model, const Config& config);
std::unique_ptr<Optimizer> make_optimizer(Engine& engine, const Config& config);

}  // namespace bonfire
