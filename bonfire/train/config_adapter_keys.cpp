#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection adapter_section() {
  return {
      .name = "adapter",
      .help =
          "Low-rank adapters (LoRA): the model's own weights, those of `checkpoint.weights`, are frozen, and two thin "
          "matrices beside each chosen product are trained.",
      .keys = {
          {.name = "adapter.rank",
           .field = BONFIRE_FIELD(model.spec.adapter.rank),
           .help = "Rank of the adapters. 0 means no adapters.",
           .range = {.at_least = 0, .at_most = 1e5}},
          {.name = "adapter.alpha",
           .field = BONFIRE_FIELD(model.spec.adapter.alpha),
           .help = "What an adapter adds is scaled by `alpha` / `rank`.",
           .range = {.more_than = 0}},
          {.name = "adapter.dropout",
           .field = BONFIRE_FIELD(model.spec.adapter.dropout),
           .help = "Dropout probability of what an adapter reads.",
           .range = {.at_least = 0, .less_than = 1}},
          {.name = "adapter.match",
           .field = BONFIRE_FIELD(model.spec.adapter.match),
           .help = "Linear layers that get an adapter, by the names that Hugging Face has for them, whole or their end: "
                   "`q_proj`, `mlp.down_proj`, `layers.3.self_attn.*_proj`; `*` stands for any letters between two dots. "
                   "Empty: all linear layers of the blocks."},
          {.name = "adapter.weights",
           .field = BONFIRE_FIELD(adapter.weights),
           .help = "Adapters that a new run begins with: a folder of PEFT's (`adapter_config.json` and "
                   "`adapter_model.safetensors`) with the same `rank`, `alpha` and layers. Empty: adapters that change "
                   "nothing yet."},
      }};
}

}  // namespace bonfire
