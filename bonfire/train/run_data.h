#pragma once

#include <memory>
#include <optional>

#include "bonfire/base/api.h"
#include "bonfire/data/source.h"
#include "bonfire/train/config.h"

namespace bonfire {

// What a run reads.
struct RunData {
  std::shared_ptr<const Source> train;
  std::shared_ptr<const Source> held_out;
  std::optional<double> entropy;       // nats per token; where it is known, no model's loss goes below it
  std::int64_t tokens_per_sample = 1;  // an image or a vector counts as one
};

enum class TokenCheck { none, all };

// Opens what [data] names. `check`: whether every token is compared with the vocabulary, which reads all files once; one
// rank of a machine is enough. Throws ConfigError that names the place in the configuration. REQUIRES: config is resolved.
BONFIRE_API RunData open_data(const Config& config, TokenCheck check);

}  // namespace bonfire
