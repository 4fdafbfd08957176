#pragma once

#include "bonfire/plan/model.h"

namespace bonfire::bench {

// The model of bench/small_llama.toml.
inline plan::ModelSpec small_llama() {
  return {.type = plan::ModelType::llama,
          .dim = 256,
          .layers = 6,
          .heads = 8,
          .kv_heads = 8,
          .ffn = 1024,
          .vocab = 4096,
          .positions = 256};
}

}  // namespace bonfire::bench
