#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection adapter_section() {
  return {.name = "adapter",
          .help =
              "Low-rank adapters (LoRA): the model's own weights, from `checkpoint.weights`, are frozen, "
              "and two small matrices are trained for each selected linear layer.",
          .keys = {
              {.name = "adapter.rank",
               .field = BONFIRE_FIELD(model.spec.adapter.rank),
               .help = "Rank of the adapters. 0 means no adapters.",
               .range = {.at_least = 0, .at_most = 1e5}},
              {.name = "adapter.alpha",
               .field = BONFIRE_FIELD(model.spec.adapter.alpha),
               .help = "The output of an adapter is scaled by `alpha` / `rank`.",
               .range = {.more_than = 0}},
              {.name = "adapter.dropout",
               .field = BONFIRE_FIELD(model.spec.adapter.dropout),
               .help = "Dropout probability of an adapter's input.",
               .range = {.at_least = 0, .less_than = 1}},
              {.name = "adapter.match",
               .field = BONFIRE_FIELD(model.spec.adapter.match),
               .help = "Linear layers that get an adapter, by their Hugging Face names, or the end of them: "
                       "`q_proj`, `mlp.down_proj`, `layers.3.self_attn.*_proj`; `*` matches any characters between "
                       "two dots. Empty: all linear layers of the blocks."},
              {.name = "adapter.weights",
               .field = BONFIRE_FIELD(adapter.weights),
               .help = "Adapters that a new run starts with: a PEFT folder (`adapter_config.json` and "
                       "`adapter_model.safetensors`) with the same `rank`, `alpha` and layers. Empty: new adapters, "
                       "which do not change the model's output at first."},
          }};
}

}  // namespace bonfire
