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
          }};
}

}  // namespace bonfire
