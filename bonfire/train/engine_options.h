#pragma once

#include <memory>

#include "bonfire/base/log.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "bonfire/train/config.h"

// What a configuration says of an engine and its optimizer. REQUIRES: it is resolved.
namespace bonfire {

ShardOptions engine_options(const Config& config, const Log& log);
std::unique_ptr<Optimizer> make_optimizer(Engine& engine, const Config& config);

}  // namespace bonfire
