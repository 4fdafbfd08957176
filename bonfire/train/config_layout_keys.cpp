#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection layout_section() {
  return {
      .name = "layout",
      .help =
          "How the model is distributed over ranks. The product of the five axes (pipeline, replicate, shard, context, "
          "tensor) is the number of ranks. If no axis is given, `replicate` is the number of ranks.",
      .keys =
          {
              {.name = "layout.pipeline",
               .field = BONFIRE_FIELD(layout.pipeline),
               .help = "Pipeline ranks, each with `chunks` stages of the model. Microbatches pass through the pipeline one "
                       "after the other.",
               .range = {.at_least = 1, .at_most = 1e5}},
              {.name = "layout.replicate",
               .field = BONFIRE_FIELD(layout.replicate),
               .help = "Replicas of the model, each with its part of the batch. If no axis is given, this is the number of "
                       "ranks.",
               .range = {.at_least = 1, .at_most = 1e6}},
              {.name = "layout.shard",
               .field = BONFIRE_FIELD(layout.shard),
               .help = "Sharding factor: the number of ranks that one replica is sharded over. 1 is plain data parallelism, "
                       "all ranks is fully sharded, and a value in between, together with `replicate`, is hybrid sharding.",
               .range = {.at_least = 1, .at_most = 1e6}},
              {.name = "layout.context",
               .field = BONFIRE_FIELD(layout.context),
               .help = "Ranks that share one sequence (context parallelism).",
               .range = {.at_least = 1, .at_most = 1},
               .later = "context parallelism"},
              {.name = "layout.tensor",
               .field = BONFIRE_FIELD(layout.tensor),
               .help = "Ranks that share each layer (tensor parallelism).",
               .range = {.at_least = 1, .at_most = 1},
               .later = "tensor parallelism"},
              {.name = "layout.schedule",
               .field = BONFIRE_FIELD(layout.schedule),
               .help = "Pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, or a file that contains a "
                       "table."},
              {.name = "layout.chunks",
               .field = BONFIRE_FIELD(layout.chunks),
               .help =
                   "Stages per pipeline rank. 0 means the schedule's default: 2 for interleaved and zb-v, 1 for the others.",
               .range = {.at_least = 0, .at_most = 1e4}},
              {.name = "layout.stages",
               .field = BONFIRE_FIELD(layout.stages),
               .help =
                   "How the model's Units (embedding, blocks, head) are divided into pipeline stages. `count`: evenly by "
                   "number. `measured`: forward and backward of each Unit are timed when the run starts, and the slowest "
                   "stage is made as fast as possible. A list: the number of Units in each stage.",
               .choices = {"count", "measured"},
               .range = {.at_least = 1, .at_most = 1e5}},
              {.name = "layout.sharded",
               .field = BONFIRE_FIELD(layout.sharded),
               .help = "What is sharded if `shard` is more than 1: optimizer state (ZeRO-1), also gradients (ZeRO-2), also "
                       "parameters (ZeRO-3). With `shard = 1` every choice is plain data parallelism.",
               .choices = {"none", "optimizer", "gradients", "parameters"}},
              {.name = "layout.reshard_after_forward",
               .field = BONFIRE_FIELD(layout.reshard_after_forward),
               .help = "Whether a Unit's gathered parameters are freed between its forward and its backward. With a number, "
                       "each rank keeps enough of them that groups of that many ranks can gather them again in backward.",
               .range = {.at_least = 1, .at_most = 1e6},
               .where_key = "layout.sharded",
               .where_values = {"parameters"}},
              {.name = "layout.prefetch",
               .field = BONFIRE_FIELD(layout.prefetch),
               .help = "Number of Units that are gathered ahead of the running one.",
               .range = {.at_least = 0, .at_most = 1e5},
               .where_key = "layout.sharded",
               .where_values = {"gradients", "parameters"}},
              {.name = "layout.backward_prefetch",
               .field = BONFIRE_FIELD(layout.backward_prefetch),
               .help =
                   "When backward gathers Units ahead of time: `before` the reductions of the running Unit are issued, or "
                   "`after`, which needs less memory.",
               .choices = {"before", "after"},
               .where_key = "layout.sharded",
               .where_values = {"parameters"}},
              {.name = "layout.accumulation",
               .field = BONFIRE_FIELD(layout.accumulation),
               .help = "How gradients are kept between microbatches: `sharded`, which reduces every microbatch, or `full`, "
                       "which reduces only the last one.",
               .choices = {"sharded", "full"},
               .where_key = "layout.sharded",
               .where_values = {"gradients", "parameters"}},
              {.name = "layout.wrap",
               .field = BONFIRE_FIELD(layout.wrap),
               .help =
                   "Which Units are gathered on their own: each `unit`, `all` together, or those with at least this many "
                   "parameters. All other parameters belong to the root.",
               .choices = {"unit", "all"},
               .range = {.at_least = 1, .at_most = 1e15}},
              {.name = "layout.wrap_types",
               .field = BONFIRE_FIELD(layout.wrap_types),
               .help = "Restrict `wrap` to these kinds of Units. Empty means all kinds.",
               .choices = {"embedding", "block", "head"}},
              {.name = "layout.ignore",
               .field = BONFIRE_FIELD(layout.ignore),
               .help =
                   "Parameters that are not sharded, by name or name prefix as in `train.freeze`: they are whole on every "
                   "rank and not trained. The model is then built as a whole before it is sharded."},
              {.name = "layout.negotiate_order",
               .field = BONFIRE_FIELD(layout.negotiate_order),
               .help = "Make ranks agree on every all-gather in every step, not only in the first. Slow; for models whose "
                       "Units run in a different order on each rank.",
               .where_key = "layout.sharded",
               .where_values = {"parameters"}},
              {.name = "layout.offload",
               .field = BONFIRE_FIELD(layout.offload),
               .help =
                   "What is kept in host memory: the master weights and state of the `optimizer`, which then runs on the "
                   "CPU, or also the `parameters`.",
               .choices = {"none", "optimizer", "parameters"}},
              {.name = "layout.recompute",
               .field = BONFIRE_FIELD(layout.recompute),
               .help = "What backward recomputes instead of keeping it in memory.",
               .choices = {"none"},
               .later = "recomputation"},
              {.name = "layout.bucket_mb",
               .field = BONFIRE_FIELD(layout.bucket_mb),
               .help = "Size of a gradient bucket in MiB.",
               .range = {.more_than = 0, .at_most = 1e6}},
              {.name = "layout.first_bucket_mb",
               .field = BONFIRE_FIELD(layout.first_bucket_mb),
               .help = "Size of the first gradient bucket in MiB; small, so that communication starts early.",
               .range = {.more_than = 0, .at_most = 1e6}},
              {.name = "layout.compression",
               .field = BONFIRE_FIELD(layout.compression),
               .help =
                   "Gradient compression for communication: none, rounding to 16 bits, or low-rank factors (PowerSGD, with "
                   "error feedback).",
               .choices = {"none", "bf16", "fp16", "powersgd"}},
              {.name = "layout.powersgd_rank",
               .field = BONFIRE_FIELD(layout.powersgd_rank),
               .help = "Rank of PowerSGD's factors.",
               .range = {.at_least = 1, .at_most = 1e4},
               .where_key = "layout.compression",
               .where_values = {"powersgd"}},
          },
      .later = {{"layout.sequence_parallel", "tensor parallelism"},
                {"layout.recompute_every", "recomputation"},
                {"layout.server", "the parameter server"}}};
}

}  // namespace bonfire
