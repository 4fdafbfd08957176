#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection train_section() {
  return {
      .name = "train",
      .help = "Number of steps, batch size, precision, initialisation, clipping, evaluation and logging.",
      .keys = {
          {.name = "train.steps",
           .field = BONFIRE_FIELD(train.steps),
           .help =
               "Number of optimizer steps. With layout.replicas the default is rounded up to whole rounds of all replicas.",
           .range = {.at_least = 1, .at_most = 1e12}},
          {.name = "train.batch",
           .field = BONFIRE_FIELD(train.batch),
           .help = "Samples per optimizer step, over all ranks; must be divisible by the number of data-parallel ranks.",
           .range = {.at_least = 1, .at_most = 1e9}},
          {.name = "train.microbatch",
           .field = BONFIRE_FIELD(train.microbatch),
           .help = "Samples per forward on one rank; must divide the rank's part of the batch. 0 means the whole part at "
                   "once.",
           .range = {.at_least = 0, .at_most = 1e9}},
          {.name = "train.precision",
           .field = BONFIRE_FIELD(train.precision),
           .help = "Compute precision. All but `fp32` keep fp32 master weights; `fp16` uses loss scaling; `fp8` is `bf16` "
                   "with the matrix products of the blocks in fp8.",
           .choices = {"fp32", "bf16", "fp16", "fp8"}},
          {.name = "train.fp8_scaling",
           .field = BONFIRE_FIELD(train.fp8_scaling),
           .help = "How fp8 scales are chosen: from the largest magnitude of the `current` call, or of the preceding calls "
                   "(`delayed`).",
           .choices = {"delayed", "current"},
           .where_key = "train.precision",
           .where_values = {"fp8"}},
          {.name = "train.fp8_scales",
           .field = BONFIRE_FIELD(train.fp8_scales),
           .help = "One scale per `tensor`, or one per `row`. With `row`, weight gradients are computed in bf16.",
           .choices = {"tensor", "row"},
           .where_key = "train.precision",
           .where_values = {"fp8"}},
          {.name = "train.gradient_precision",
           .field = BONFIRE_FIELD(train.gradient_precision),
           .help = "Dtype in which gradients are stored until the update: `fp32`, or that of `precision`, which saves "
                   "memory but rounds when microbatches are accumulated.",
           .choices = {"fp32", "bf16", "fp16"}},
          {.name = "train.reduction_precision",
           .field = BONFIRE_FIELD(train.reduction_precision),
           .help = "Dtype in which gradients are communicated: the one they are stored in (`gradient`), or a lower "
                   "precision.",
           .choices = {"gradient", "fp32", "bf16", "fp16"}},
          {.name = "train.output_precision",
           .field = BONFIRE_FIELD(train.output_precision),
           .help = "Dtype of the loss. `model`: as the model computes it.",
           .choices = {"model", "fp32", "bf16", "fp16"}},
          {.name = "train.buffer_precision",
           .field = BONFIRE_FIELD(train.buffer_precision),
           .help = "Dtype of the model's buffers, tensors that are not trained and are kept equal on all ranks: as the "
                   "`model` creates them, or cast. None of the four model families has any.",
           .choices = {"model", "fp32", "bf16", "fp16"}},
          {.name = "train.keep_fp32",
           .field = BONFIRE_FIELD(train.keep_fp32),
           .help = "Parameters that forward reads in fp32 even in lower precision: `norms`, `biases`, `embeddings`, or "
                   "names or name prefixes within a Unit, such as `attention_norm`.",
           .where_key = "train.precision",
           .where_values = {"bf16", "fp16", "fp8"}},
          {.name = "train.keep_for_backward",
           .field = BONFIRE_FIELD(train.keep_for_backward),
           .help = "Which cheaply recomputed results forward saves for backward: `least`, none of them; `activations`, "
                   "those of the feed-forward layers; `all`, norms too. Saving more is about a percent faster and needs "
                   "more memory.",
           .choices = {"least", "activations", "all"}},
          {.name = "train.graphs",
           .field = BONFIRE_FIELD(train.graphs),
           .help = "On a GPU, capture a whole step as a CUDA graph and replay it: `on`, or an error if that is not "
                   "possible; `auto`, if possible; `off`. Results are bitwise the same.",
           .choices = {"auto", "on", "off"}},
          {.name = "train.freeze",
           .field = BONFIRE_FIELD(train.freeze),
           .help = "Parameters that are not trained, by name or name prefix: `embedding`, `blocks.0`, "
                   "`blocks.*.attention`. They need neither gradients nor optimizer state."},
          {.name = "train.start",
           .field = BONFIRE_FIELD(train.start),
           .help = "What to do if initial weights differ between ranks: `check` reports an error that names one of them, "
                   "`broadcast` sends rank 0's weights to all ranks.",
           .choices = {"check", "broadcast"}},
          {.name = "train.clip",
           .field = BONFIRE_FIELD(train.clip),
           .help = "Maximum global gradient norm. 0 disables clipping.",
           .range = {.at_least = 0}},
          {.name = "train.clip_value",
           .field = BONFIRE_FIELD(train.clip_value),
           .help = "Maximum absolute value of each gradient element, applied before `clip`. 0 means no limit.",
           .range = {.at_least = 0}},
          {.name = "train.seed",
           .field = BONFIRE_FIELD(train.seed),
           .help = "Seed of the initial weights, the sample order and dropout.",
           .range = {.at_least = 0}},
          {.name = "train.log_every",
           .field = BONFIRE_FIELD(train.log_every),
           .help = "Steps between log lines; `metrics.jsonl` contains every step.",
           .range = {.at_least = 1, .at_most = 1e12}},
          {.name = "train.eval_every",
           .field = BONFIRE_FIELD(train.eval_every),
           .help = "Steps between evaluations on held-out data. 0 disables evaluation.",
           .range = {.at_least = 0, .at_most = 1e12}},
          {.name = "train.eval_batches",
           .field = BONFIRE_FIELD(train.eval_batches),
           .help = "Batches per evaluation.",
           .range = {.at_least = 1, .at_most = 1e9}},
          {.name = "train.nan_policy",
           .field = BONFIRE_FIELD(train.nan_policy),
           .help = "What to do if the loss or a gradient is not finite on any rank: `stop` the run, `skip` the "
                   "step on all ranks, or `rollback` all ranks to the newest checkpoint and repeat the steps "
                   "since then. A run that fails again without getting further than before is stopped.",
           .choices = {"stop", "skip", "rollback"}},
          {.name = "train.trace_from",
           .field = BONFIRE_FIELD(train.trace_from),
           .help = "First step to trace.",
           .range = {.at_least = 1, .at_most = 1e12}},
          {.name = "train.trace_steps",
           .field = BONFIRE_FIELD(train.trace_steps),
           .help = "Number of steps in `trace.json`, which shows computation and communication of each rank. 0 disables "
                   "tracing.",
           .range = {.at_least = 0, .at_most = 1e6}},
      }};
}

}  // namespace bonfire
