#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection run_section() {
  return {
      .name = "run",
      .help = "The run folder, the device, and time and memory limits.",
      .keys = {
          {.name = "run.name", .field = BONFIRE_FIELD(run.name), .help = "Name of the run and of its folder."},
          {.name = "run.folder",
           .field = BONFIRE_FIELD(run.folder),
           .help = "Folder in which run folders are created. If `NAME` exists already, a number is appended; `NAME-latest` "
                   "links to the newest."},
          {.name = "run.device",
           .field = BONFIRE_FIELD(run.device),
           .help = "Device to train on. `auto` uses the GPU if there is one that works, and the CPU otherwise.",
           .choices = {"auto", "cpu", "cuda"}},
          {.name = "run.threads",
           .field = BONFIRE_FIELD(run.threads),
           .help = "CPU threads per rank. 0 uses `OMP_NUM_THREADS` if it is set, and otherwise divides the machine's cores "
                   "among its ranks.",
           .range = {.at_least = 0, .at_most = 4096}},
          {.name = "run.timeout",
           .field = BONFIRE_FIELD(run.timeout),
           .help = "Seconds after which an unfinished collective is an error.",
           .range = {.more_than = 0, .at_most = 1e9}},
          {.name = "run.watchdog",
           .field = BONFIRE_FIELD(run.watchdog),
           .help = "Seconds that ranks wait for a rank that has fallen behind before the run ends with an error that names "
                   "the rank and the collective. 0 disables this. `BONFIRE_STALL_TIMEOUT` overrides it.",
           .range = {.at_least = 0, .at_most = 1e9}},
          {.name = "run.heartbeat",
           .field = BONFIRE_FIELD(run.heartbeat),
           .help = "Seconds without a heartbeat after which a rank counts as lost and the run ends. 0 disables this. "
                   "`BONFIRE_HEARTBEAT_TIMEOUT` overrides it.",
           .range = {.at_least = 0, .at_most = 1e9}},
          {.name = "run.debug_collectives",
           .field = BONFIRE_FIELD(run.debug_collectives),
           .help = "Compare the kind, shape, dtype and sequence number of each collective between ranks before it starts. "
                   "Slow; for debugging."},
          {.name = "run.debug_parameters",
           .field = BONFIRE_FIELD(run.debug_parameters),
           .help = "Check every tensor that enters or leaves a Unit: none may use the memory of a parameter that has been "
                   "freed. Slow; for debugging."},
          {.name = "run.memory_cap",
           .field = BONFIRE_FIELD(run.memory_cap),
           .help = "Upper limit for the tensor memory of one rank. A layout that needs more is refused before training "
                   "starts, with the memory it needs and a layout that would fit. 0 means no limit.",
           .range = {.at_least = 0}},
          {.name = "run.disk_full",
           .field = BONFIRE_FIELD(run.disk_full),
           .help = "What to do if a file of the run folder (metrics, TensorBoard events, trace) cannot be written, for "
                   "example because the disk is full: `warn` logs the reason and training continues, `stop` ends the run. "
                   "A run that has completed all its steps never fails because of this.",
           .choices = {"warn", "stop"}},
      }};
}

}  // namespace bonfire
