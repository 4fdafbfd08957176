#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection layout_section() {
  return {
      .name = "layout",
      .help =
          "How the model is distributed over ranks. The product of the five axes (pipeline, replicate, shard, context, "
          "tensor) is the number of ranks. If no axis is given, `replicate` is the number of ranks.",
      .keys = {
          {.name = "layout.pipeline",
           .field = BONFIRE_FIELD(layout.pipeline),
           .help = "Number of pipeline ranks. Each holds `chunks` stages of the model. With PipeDream's schedules: the "
                   "number "
                   "of stages.",
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
           .help = "Ranks that share the positions of each sample (context parallelism), for sequences whose activations "
                   "are too large for one rank. For llama and gpt2; `data.sequence` must be a multiple of twice this.",
           .range = {.at_least = 1, .at_most = 1e4}},
          {.name = "layout.context_attention",
           .field = BONFIRE_FIELD(layout.context_attention),
           .help = "With `context` of 2 or more, how ranks attend to each other's positions. `ring`: keys and "
                   "values are passed from rank to rank. `heads`: during attention each rank has all positions "
                   "of some of the heads; `context` must then divide the number of heads and of key heads on a "
                   "rank.",
           .choices = {"ring", "heads"}},
          {.name = "layout.tensor",
           .field = BONFIRE_FIELD(layout.tensor),
           .help = "Ranks that split each layer (tensor parallelism): attention heads, the width of the "
                   "feed-forward layers, and the vocabulary. They work on the same samples. For llama and gpt2; "
                   "must divide `heads` and `ffn`, and divide `kv_heads` or be a multiple of it.",
           .range = {.at_least = 1, .at_most = 1e4}},
          {.name = "layout.sequence_parallel",
           .field = BONFIRE_FIELD(layout.sequence_parallel),
           .help = "With `tensor` of 2 or more: whether norms, dropout and residuals are divided along the "
                   "sequence, which saves memory; `tensor` must then divide `data.sequence`. With false, every "
                   "rank computes them for all positions."},
          {.name = "layout.tensor_chunks",
           .field = BONFIRE_FIELD(layout.tensor_chunks),
           .help = "With `tensor` of 2 or more: the number of chunks into which a block's matrix products, and "
                   "the communication before or after each, are divided, so that one chunk is communicated while "
                   "another is computed. Chunks are samples of a microbatch, or parts of the sequence if there "
                   "are fewer samples than chunks.",
           .range = {.at_least = 1, .at_most = 1024}},
          {.name = "layout.schedule",
           .field = BONFIRE_FIELD(layout.schedule),
           .help = "Pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, or a file that "
                   "contains a table. PipeDream's schedules, which update stages while other minibatches are in "
                   "flight: pipedream, pipedream-vertical, pipedream-2bw, pipedream-flush."},
          {.name = "layout.chunks",
           .field = BONFIRE_FIELD(layout.chunks),
           .help = "Stages per pipeline rank. 0 means the schedule's default: 2 for interleaved and zb-v, 1 for the others.",
           .range = {.at_least = 0, .at_most = 1e4}},
          {.name = "layout.stages",
           .field = BONFIRE_FIELD(layout.stages),
           .help = "How the model's Units (embedding, blocks, head) are divided into pipeline stages. `count`: evenly by "
                   "number. `measured`: forward and backward of each Unit are timed when the run starts, and the slowest "
                   "stage is made as fast as possible. A list: the number of Units in each stage.",
           .choices = {"count", "measured"},
           .range = {.at_least = 1, .at_most = 1e5}},
          {.name = "layout.replicas",
           .field = BONFIRE_FIELD(layout.replicas),
           .help = "For PipeDream's schedules: the number of ranks of each stage, such as [3, 1], which take "
                   "turns with minibatches. The number of ranks is the sum. Empty means one rank per stage.",
           .range = {.at_least = 1, .at_most = 1e5}},
          {.name = "layout.stash",
           .field = BONFIRE_FIELD(layout.stash),
           .help = "For schedule = pipedream: whether a stage keeps the weights of a forward for its backward. "
                   "With false, a backward uses the newest weights, and its gradients are not exact for any "
                   "version of the weights."},
          {.name = "layout.sharded",
           .field = BONFIRE_FIELD(layout.sharded),
           .help = "What is sharded if `shard` is more than 1: optimizer state (ZeRO-1), also gradients (ZeRO-2), also "
                   "parameters (ZeRO-3). With `shard = 1` every choice is plain data parallelism.",
           .choices = {"none", "optimizer", "gradients", "parameters"}},
          {.name = "layout.reshard_after_forward",
           .field = BONFIRE_FIELD(layout.reshard_after_forward),
           .help = "Whether a Unit's gathered parameters are freed between its forward and its backward. With a "
                   "number n, each rank keeps 1/n of them, and backward gathers them among n ranks. In a "
                   "pipeline the default is false: the schedule decides when whole stages are gathered. With "
                   "true, Units are gathered one by one, for each microbatch and direction, which needs less "
                   "memory.",
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
           .help = "When backward gathers Units ahead of time: `before` the reductions of the running Unit are issued, or "
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
           .help = "Which Units are gathered on their own: each `unit`, `all` together, or those with at least this many "
                   "parameters. All other parameters belong to the root.",
           .choices = {"unit", "all"},
           .range = {.at_least = 1, .at_most = 1e15}},
          {.name = "layout.wrap_types",
           .field = BONFIRE_FIELD(layout.wrap_types),
           .help = "Restrict `wrap` to these kinds of Units. Empty means all kinds.",
           .choices = {"embedding", "block", "head"}},
          {.name = "layout.ignore",
           .field = BONFIRE_FIELD(layout.ignore),
           .help = "Parameters that are not sharded, by name or name prefix as in `train.freeze`: they are whole on every "
                   "rank and not trained. The model is then built as a whole before it is sharded."},
          {.name = "layout.negotiate_order",
           .field = BONFIRE_FIELD(layout.negotiate_order),
           .help = "Make ranks agree on every all-gather in every step, not only in the first. Slow; for models whose "
                   "Units run in a different order on each rank.",
           .where_key = "layout.sharded",
           .where_values = {"parameters"}},
          {.name = "layout.offload",
           .field = BONFIRE_FIELD(layout.offload),
           .help = "What is kept in host memory: the master weights and state of the `optimizer`, which then runs on the "
                   "CPU, or also the `parameters`.",
           .choices = {"none", "optimizer", "parameters"}},
          {.name = "layout.recompute",
           .field = BONFIRE_FIELD(layout.recompute),
           .help = "Which activations backward recomputes instead of keeping them from forward. `selective`: the "
                   "input of the activation function and q, k and v, in every block; not for vgg. `full`: "
                   "everything except a block's input. See [recomputation](recomputation.md).",
           .choices = {"none", "selective", "full"}},
          {.name = "layout.recompute_every",
           .field = BONFIRE_FIELD(layout.recompute_every),
           .help = "With `recompute`: recompute only every n-th block, starting with the first.",
           .range = {.at_least = 1, .at_most = 1e5},
           .where_key = "layout.recompute",
           .where_values = {"selective", "full"}},
          {.name = "layout.recompute_offload",
           .field = BONFIRE_FIELD(layout.recompute_offload),
           .help = "On a GPU: whether the inputs of recomputed blocks are moved to host memory, and back during "
                   "backward.",
           .where_key = "layout.recompute",
           .where_values = {"full"}},
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
           .help = "Gradient compression for communication: none, rounding to 16 bits, or low-rank factors (PowerSGD, with "
                   "error feedback).",
           .choices = {"none", "bf16", "fp16", "powersgd"}},
          {.name = "layout.powersgd_rank",
           .field = BONFIRE_FIELD(layout.powersgd_rank),
           .help = "Rank of PowerSGD's factors.",
           .range = {.at_least = 1, .at_most = 1e4},
           .where_key = "layout.compression",
           .where_values = {"powersgd"}},
          {.name = "layout.server",
           .field = BONFIRE_FIELD(layout.server),
           .help = "Ranks that hold the weights and the optimizer as parameter servers, in addition to the "
                   "`replicate` ranks, which are their workers. Servers are the first ranks. 0 means no servers: "
                   "each rank has an optimizer, and ranks reduce their gradients among themselves.",
           .range = {.at_least = 0, .at_most = 1e5}},
          {.name = "layout.server_mode",
           .field = BONFIRE_FIELD(layout.server_mode),
           .help = "Who waits for whom. `synchronous`: an update uses the average gradient of all workers. In "
                   "the other modes each worker's gradient is an update of its own: `bounded` lets a worker be "
                   "at most `server_staleness` steps ahead of the slowest one, `asynchronous` has no limit.",
           .choices = {"synchronous", "bounded", "asynchronous"}},
          {.name = "layout.server_staleness",
           .field = BONFIRE_FIELD(layout.server_staleness),
           .help = "How many steps a worker may be ahead of the slowest one.",
           .range = {.at_least = 0, .at_most = 1e6},
           .where_key = "layout.server_mode",
           .where_values = {"bounded"}},
          {.name = "layout.server_backup",
           .field = BONFIRE_FIELD(layout.server_backup),
           .help = "Number of backup workers: an update uses the gradients that arrive first and drops those of this many "
                   "workers, which arrive last."
                   " A step is an update: a worker that is late continues with the step after the newest one.",
           .range = {.at_least = 0, .at_most = 1e5},
           .where_key = "layout.server_mode",
           .where_values = {"synchronous"}},
          {.name = "layout.server_lost",
           .field = BONFIRE_FIELD(layout.server_lost),
           .help = "What happens when a worker is lost. `stop`: the run ends, and `--max-restarts` starts all ranks "
                   "again from the newest checkpoint. `drop`: the others go on without it, and the summary says which "
                   "samples were lost. `wait`: it is started again alone, at most ten times, and the others wait for it as "
                   "far as `server_mode` makes them. A server that is lost ends the run.",
           .choices = {"stop", "drop", "wait"}},
          {.name = "layout.server_save_every",
           .field = BONFIRE_FIELD(layout.server_save_every),
           .help = "Number of steps between checkpoints of the servers, in place of `checkpoint.every`."
                   " 0 means `checkpoint.every`. Where each worker's gradient is an update, a step is one update for each "
                   "worker. Servers tell workers with each reply which update has been saved.",
           .range = {.at_least = 0, .at_most = 1e9}},
      }};
}

}  // namespace bonfire
