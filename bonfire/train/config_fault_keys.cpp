#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection fault_section() {
  return {.name = "fault",
          .help = "Injected faults, for tests only.",
          .keys = {
              {.name = "fault.nan_step",
               .field = BONFIRE_FIELD(fault.nan_step),
               .help = "Step at which the loss of one rank becomes NaN. 0 means never.",
               .range = {.at_least = 0, .at_most = 1e12}},
              {.name = "fault.nan_rank",
               .field = BONFIRE_FIELD(fault.nan_rank),
               .help = "Rank whose loss becomes NaN.",
               .range = {.at_least = 0, .at_most = 1e6}},
              {.name = "fault.nan_times",
               .field = BONFIRE_FIELD(fault.nan_times),
               .help = "How often this happens if the run goes back to a checkpoint and reaches this step again. 0 "
                       "means every time.",
               .range = {.at_least = 0, .at_most = 1e6}},
              {.name = "fault.memory_step",
               .field = BONFIRE_FIELD(fault.memory_step),
               .help = "Step in which one rank requests more memory than there is. 0 means never.",
               .range = {.at_least = 0, .at_most = 1e12}},
              {.name = "fault.memory_rank",
               .field = BONFIRE_FIELD(fault.memory_rank),
               .help = "Rank that requests it.",
               .range = {.at_least = 0, .at_most = 1e6}},
          }};
}

}  // namespace bonfire
