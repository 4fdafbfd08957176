#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection checkpoint_section() {
  return {.name = "checkpoint",
          .later = {{"checkpoint.every", "checkpoints"},
                    {"checkpoint.keep", "checkpoints"},
                    {"checkpoint.asynchronous", "checkpoints"}}};
}

}  // namespace bonfire
