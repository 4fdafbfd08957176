#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection checkpoint_section() {
  return {
      .name = "checkpoint",
      .help =
          "When the state of the run is saved. Checkpoints are folders in `checkpoints/` of the run folder; any layout can "
          "resume from them.",
      .keys = {
          {.name = "checkpoint.every",
           .field = BONFIRE_FIELD(checkpoint.every),
           .help = "Number of steps between saves; the state after the last step is saved too. 0 saves nothing. With "
                   "layout.replicas the default is rounded up to whole rounds of all replicas.",
           .range = {.at_least = 0}},
          {.name = "checkpoint.keep",
           .field = BONFIRE_FIELD(checkpoint.keep),
           .help =
               "How many of the newest checkpoints to keep. 0 keeps all. An older one is only removed after a newer one is "
               "complete.",
           .range = {.at_least = 0, .at_most = 1e6}},
          {.name = "checkpoint.asynchronous",
           .field = BONFIRE_FIELD(checkpoint.asynchronous),
           .help =
               "Copy the state to host memory and write it while training continues. This needs host memory for one copy "
               "of what the rank saves."},
          {.name = "checkpoint.drain",
           .field = BONFIRE_FIELD(checkpoint.drain),
           .help = "PipeDream's schedules: run the pipeline empty before a save. With `false` each rank copies what it "
                   "saves when it has made the updates of the step, also if not `asynchronous`, and the pipeline stays "
                   "full."},
          {.name = "checkpoint.busy",
           .field = BONFIRE_FIELD(checkpoint.busy),
           .help = "What to do if a save is due while the previous one is still being written: `wait` until it "
                   "is complete, or `skip` the new one.",
           .choices = {"wait", "skip"}},
          {.name = "checkpoint.failed",
           .field = BONFIRE_FIELD(checkpoint.failed),
           .help =
               "What to do if a checkpoint cannot be written, for example because the disk is full: `warn` logs the reason "
               "and training continues, `stop` ends the run at the next save. The last complete checkpoint is kept either "
               "way.",
           .choices = {"warn", "stop"}},
          {.name = "checkpoint.grace",
           .field = BONFIRE_FIELD(checkpoint.grace),
           .help =
               "Seconds that a run has to finish its step and save once it is asked to stop (`SIGTERM`, `SIGUSR1`, ...). "
               "A rank that takes longer ends with exit code 1, and the last complete checkpoint is kept. Set it below the "
               "time after which the cluster kills the job.",
           .range = {.at_least = 0.1, .at_most = 1e6}},
          {.name = "checkpoint.weights",
           .field = BONFIRE_FIELD(checkpoint.weights),
           .help = "Checkpoint whose weights a new run starts with: its folder, or that of a run. Optimizer "
                   "state, step and position in the data are not taken from it. A resumed run ignores this. "
                   "Empty: none."},
          {.name = "checkpoint.weights_of",
           .field = BONFIRE_FIELD(checkpoint.weights_of),
           .help = "Parameters and buffers to take from `checkpoint.weights`, by name or name prefix; `*` "
                   "matches any characters between two dots. The others keep their initial values. Empty: all."},
      }};
}

}  // namespace bonfire
