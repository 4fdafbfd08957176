#pragma once

#include <memory>
#include <optional>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/data/source.h"
#include "bonfire/data/token_check.h"
#include "bonfire/train/config.h"

namespace bonfire {

// What a run reads.
struct RunData {
  std::shared_ptr<const Source> train;
  std::shared_ptr<const Source> held_out;
  std::optional<double> entropy;       // nats per token; where it is known, no model's loss goes below it
  std::int64_t tokens_per_sample = 1;  // an image or a vector counts as one
};

// Opens what [data] names. Throws ConfigError that names the place in the configuration. REQUIRES: config is resolved.
BONFIRE_API RunData open_data(const Config& config);
// The same for one rank of a machine, which checks token files as [data] check says before the others read them.
BONFIRE_API RunData check_data(const Config& config, const Log& log);

}  // namespace bonfire
