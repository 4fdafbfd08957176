#include "bonfire/train/config_keys.h"

#include <algorithm>

#include "bonfire/base/error.h"

namespace bonfire {

// The table is the one place that knows a key: a row is all that a new option needs to be read, checked, overridden,
// written to the run folder and described in docs/configuration.md.
#define FIELD(member) (+[](Config& config) -> decltype(auto) { return (config.member); })

namespace {

// The empty name, no preset, is a choice too.
std::vector<std::string> preset_names() {
  auto names = plan::published_model_names();
  names.insert(names.begin(), "");
  return names;
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = {
      {.name = "run.name", .field = FIELD(run.name), .help = "Name of the run and of its folder."},
      {.name = "run.folder",
       .field = FIELD(run.folder),
       .help = "Folder in which run folders are made; a number is added to the name where it exists, and `NAME-latest` "
               "points to the newest."},
      {.name = "run.device",
       .field = FIELD(run.device),
       .help = "Where to train. `auto`: the GPU where there is one that works, else the CPU.",
       .choices = {"auto", "cpu", "cuda"}},
      {.name = "run.threads",
       .field = FIELD(run.threads),
       .help = "Threads that one rank computes with on the CPU. 0: `OMP_NUM_THREADS`, else the machine's cores divided "
               "among its ranks.",
       .range = {.at_least = 0, .at_most = 4096}},
      {.name = "run.timeout",
       .field = FIELD(run.timeout),
       .help = "Seconds after which a collective that does not end is an error.",
       .range = {.more_than = 0}},
      {.name = "run.watchdog",
       .field = FIELD(run.watchdog),
       .help = "Seconds for which ranks may wait for another before that one, and the collective it is behind in, are named "
               "and the run ends. 0: never. `BONFIRE_STALL_TIMEOUT` wins.",
       .range = {.at_least = 0}},
      {.name = "run.heartbeat",
       .field = FIELD(run.heartbeat),
       .help = "Seconds without a sign of life after which a rank counts as lost and the run ends. 0: never. "
               "`BONFIRE_HEARTBEAT_TIMEOUT` wins.",
       .range = {.at_least = 0}},
      {.name = "run.debug_collectives",
       .field = FIELD(run.debug_collectives),
       .help = "Compare kind, shape, dtype and number of each collective between the ranks before it starts. Slow; for "
               "finding mistakes."},

      {.name = "model.preset",
       .field = FIELD(model.preset),
       .help = "A published shape; the other keys of the section change it.",
       .choices = preset_names()},
      {.name = "model.type",
       .field = FIELD(model.type),
       .help = "Family of the model.",
       .choices = {"llama", "gpt2", "vgg", "mlp"}},
      {.name = "model.dim",
       .field = FIELD(model.spec.dim),
       .help = "Width of the hidden state.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2", "mlp"}},
      {.name = "model.layers",
       .field = FIELD(model.spec.layers),
       .help = "Number of blocks.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2", "mlp"}},
      {.name = "model.heads",
       .field = FIELD(model.spec.heads),
       .help = "Attention heads; they divide `dim`.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2"}},
      {.name = "model.kv_heads",
       .field = FIELD(model.spec.kv_heads),
       .help = "Heads of keys and values; they divide `heads`. 0: as many as `heads`.",
       .range = {.at_least = 0},
       .where_key = "model.type",
       .where_values = {"llama"}},
      {.name = "model.head_dim",
       .field = FIELD(model.spec.head_dim),
       .help = "Width of a head. 0: `dim` over `heads`.",
       .range = {.at_least = 0},
       .where_key = "model.type",
       .where_values = {"llama"}},
      {.name = "model.ffn",
       .field = FIELD(model.spec.ffn),
       .help = "Width inside the feed-forward part; of `vgg`, of the classifier's two hidden layers. 0: 4 times `dim`; of "
               "`vgg`, 64 times `width`.",
       .range = {.at_least = 0}},
      {.name = "model.vocab",
       .field = FIELD(model.spec.vocab),
       .help = "Tokens in the vocabulary.",
       .range = {.at_least = 2},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2", "mlp"}},
      {.name = "model.positions",
       .field = FIELD(model.spec.positions),
       .help = "Longest sequence. 0: `data.sequence`.",
       .range = {.at_least = 0},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2"}},
      {.name = "model.tied",
       .field = FIELD(model.spec.tied),
       .help = "Whether the head shares its weight with the embedding.",
       .where_key = "model.type",
       .where_values = {"llama", "gpt2", "mlp"}},
      {.name = "model.dropout",
       .field = FIELD(model.spec.dropout),
       .help = "Probability that an activation is dropped.",
       .range = {.at_least = 0, .less_than = 1},
       .where_key = "model.type",
       .where_values = {"gpt2", "mlp", "vgg"}},
      {.name = "model.norm_eps",
       .field = FIELD(model.spec.norm_eps),
       .help = "Added to the variance in normalisation.",
       .range = {.more_than = 0},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2"}},
      {.name = "model.rope_theta",
       .field = FIELD(model.spec.rope_theta),
       .help = "Base of the rotary position angles.",
       .range = {.more_than = 0},
       .where_key = "model.type",
       .where_values = {"llama"}},
      {.name = "model.inputs",
       .field = FIELD(model.spec.inputs),
       .help = "Numbers in an input vector, which is sorted into `classes`. 0: reads tokens.",
       .range = {.at_least = 0},
       .where_key = "model.type",
       .where_values = {"mlp"}},
      {.name = "model.classes",
       .field = FIELD(model.spec.classes),
       .help = "Classes to tell apart.",
       .range = {.at_least = 2},
       .where_key = "model.type",
       .where_values = {"vgg", "mlp"}},
      {.name = "model.image",
       .field = FIELD(model.spec.image),
       .help = "Height and width of an image.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"vgg"}},
      {.name = "model.channels",
       .field = FIELD(model.spec.channels),
       .help = "Channels of an image.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"vgg"}},
      {.name = "model.pool",
       .field = FIELD(model.spec.pool),
       .help = "Side of the square that the classifier sees.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"vgg"}},
      {.name = "model.width",
       .field = FIELD(model.spec.width),
       .help = "Channels of the first convolution where `convolutions` names none; 64 is the published network.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"vgg"}},
      {.name = "model.convolutions",
       .field = FIELD(model.spec.convolutions),
       .help = "Output channels of each 3x3 convolution, 0 for a pooling. Empty: those of VGG16, from `width` up.",
       .range = {.at_least = 0},
       .where_key = "model.type",
       .where_values = {"vgg"}},

      {.name = "data.type",
       .field = FIELD(data.type),
       .help = "`synthetic`: made from the seed, with a known entropy. `tokens`: files of tokens (llm.c or Megatron).",
       .choices = {"synthetic", "tokens"}},
      {.name = "data.sequence",
       .field = FIELD(data.sequence),
       .help = "Tokens in a sample.",
       .range = {.at_least = 1},
       .where_key = "model.type",
       .where_values = {"llama", "gpt2", "mlp"}},
      {.name = "data.paths",
       .field = FIELD(data.paths),
       .help = "Token files to train on.",
       .where_key = "data.type",
       .where_values = {"tokens"}},
      {.name = "data.held_out",
       .field = FIELD(data.held_out),
       .help = "Share of the samples, the last ones, that is kept for evaluation and never trained on. Of endless synthetic "
               "data, one half.",
       .range = {.more_than = 0, .less_than = 1}},
      {.name = "data.seed",
       .field = FIELD(data.seed),
       .help = "Decides the synthetic data.",
       .range = {.at_least = 0},
       .where_key = "data.type",
       .where_values = {"synthetic"}},
      {.name = "data.branching",
       .field = FIELD(data.branching),
       .help = "Tokens that may follow a given one in the synthetic chain.",
       .range = {.at_least = 1},
       .where_key = "data.type",
       .where_values = {"synthetic"}},
      {.name = "data.noise",
       .field = FIELD(data.noise),
       .help = "Standard deviation of the noise on synthetic images and vectors, whose own is 1.",
       .range = {.at_least = 0},
       .where_key = "data.type",
       .where_values = {"synthetic"}},

      {.name = "train.steps", .field = FIELD(train.steps), .help = "Optimizer steps.", .range = {.at_least = 1}},
      {.name = "train.batch",
       .field = FIELD(train.batch),
       .help = "Samples in one optimizer step, over all ranks; the data-parallel ranks must divide it.",
       .range = {.at_least = 1}},
      {.name = "train.microbatch",
       .field = FIELD(train.microbatch),
       .help = "Samples in one forward on one rank; must divide the rank's part of the batch. 0: all of it at once.",
       .range = {.at_least = 0}},
      {.name = "train.precision",
       .field = FIELD(train.precision),
       .help = "What the model computes in. `bf16` and `fp16` keep fp32 master weights; `fp16` scales the loss.",
       .choices = {"fp32", "bf16", "fp16"},
       .later = "fp8 arithmetic"},
      {.name = "train.clip",
       .field = FIELD(train.clip),
       .help = "Largest norm of all gradients together. 0: no clipping.",
       .range = {.at_least = 0}},
      {.name = "train.seed",
       .field = FIELD(train.seed),
       .help = "Decides the first weights, the order of the samples and dropout.",
       .range = {.at_least = 0}},
      {.name = "train.log_every",
       .field = FIELD(train.log_every),
       .help = "Steps between lines on the screen; `metrics.jsonl` has every step.",
       .range = {.at_least = 1}},
      {.name = "train.eval_every",
       .field = FIELD(train.eval_every),
       .help = "Steps between evaluations on held-out data. 0: none.",
       .range = {.at_least = 0}},
      {.name = "train.eval_batches",
       .field = FIELD(train.eval_batches),
       .help = "Batches of one evaluation.",
       .range = {.at_least = 1}},
      {.name = "train.nan_policy",
       .field = FIELD(train.nan_policy),
       .help = "On a loss or gradient that is not finite, on any rank: `stop` the run, or `skip` the step on all ranks.",
       .choices = {"stop", "skip"}},
      {.name = "train.trace_from",
       .field = FIELD(train.trace_from),
       .help = "First step of the trace.",
       .range = {.at_least = 1}},
      {.name = "train.trace_steps",
       .field = FIELD(train.trace_steps),
       .help = "Steps in `trace.json`, which shows compute and communication of each rank. 0: no trace.",
       .range = {.at_least = 0}},

      {.name = "optimizer.type",
       .field = FIELD(optimizer.type),
       .help = "Update rule.",
       .choices = {"adamw", "adam", "sgd"}},
      {.name = "optimizer.lr",
       .field = FIELD(optimizer.lr),
       .help = "Learning rate after the warm-up.",
       .range = {.at_least = 0}},
      {.name = "optimizer.betas",
       .field = FIELD(optimizer.betas),
       .help = "Decay of the two moments.",
       .range = {.at_least = 0, .less_than = 1},
       .where_key = "optimizer.type",
       .where_values = {"adamw", "adam"}},
      {.name = "optimizer.eps",
       .field = FIELD(optimizer.eps),
       .help = "Added to the root of the second moment.",
       .range = {.more_than = 0},
       .where_key = "optimizer.type",
       .where_values = {"adamw", "adam"}},
      {.name = "optimizer.weight_decay",
       .field = FIELD(optimizer.weight_decay),
       .help = "Pull of the weights towards zero; `adamw` keeps it apart from the gradient.",
       .range = {.at_least = 0}},
      {.name = "optimizer.amsgrad",
       .field = FIELD(optimizer.amsgrad),
       .help = "Divide by the largest second moment so far.",
       .where_key = "optimizer.type",
       .where_values = {"adamw", "adam"}},
      {.name = "optimizer.maximize", .field = FIELD(optimizer.maximize), .help = "Climb instead of descend."},
      {.name = "optimizer.momentum",
       .field = FIELD(optimizer.momentum),
       .help = "Share of the last update that is kept.",
       .range = {.at_least = 0, .less_than = 1},
       .where_key = "optimizer.type",
       .where_values = {"sgd"}},
      {.name = "optimizer.nesterov",
       .field = FIELD(optimizer.nesterov),
       .help = "Look ahead along the momentum.",
       .where_key = "optimizer.type",
       .where_values = {"sgd"}},
      {.name = "optimizer.warmup",
       .field = FIELD(optimizer.warmup),
       .help = "Steps over which the learning rate grows from zero.",
       .range = {.at_least = 0}},
      {.name = "optimizer.decay",
       .field = FIELD(optimizer.decay),
       .help = "How the learning rate goes to `min_lr` after the warm-up.",
       .choices = {"cosine", "linear", "constant"}},
      {.name = "optimizer.min_lr",
       .field = FIELD(optimizer.min_lr),
       .help = "Learning rate at the last step.",
       .range = {.at_least = 0},
       .where_key = "optimizer.decay",
       .where_values = {"cosine", "linear"}},
      {.name = "optimizer.loss_scale",
       .field = FIELD(optimizer.loss_scale),
       .help = "First scale of the loss; halved after a step whose gradients overflow, which is skipped and counted.",
       .range = {.more_than = 0},
       .where_key = "train.precision",
       .where_values = {"fp16"}},
      {.name = "optimizer.scale_growth_interval",
       .field = FIELD(optimizer.scale_growth_interval),
       .help = "Good steps in a row after which the scale is doubled.",
       .range = {.at_least = 1},
       .where_key = "train.precision",
       .where_values = {"fp16"}},

      {.name = "layout.pipeline",
       .field = FIELD(layout.pipeline),
       .help = "Stages of the pipeline.",
       .range = {.at_least = 1, .at_most = 1},
       .later = "pipeline parallelism"},
      {.name = "layout.replicate",
       .field = FIELD(layout.replicate),
       .help = "Replicas of the model, each with its part of the batch. Where no axis is given: the number of ranks.",
       .range = {.at_least = 1}},
      {.name = "layout.shard",
       .field = FIELD(layout.shard),
       .help = "Ranks over which one replica is sharded.",
       .range = {.at_least = 1, .at_most = 1},
       .later = "sharding"},
      {.name = "layout.context",
       .field = FIELD(layout.context),
       .help = "Ranks that share one sequence.",
       .range = {.at_least = 1, .at_most = 1},
       .later = "context parallelism"},
      {.name = "layout.tensor",
       .field = FIELD(layout.tensor),
       .help = "Ranks that share each layer.",
       .range = {.at_least = 1, .at_most = 1},
       .later = "tensor parallelism"},
      {.name = "layout.sharded",
       .field = FIELD(layout.sharded),
       .help = "What is sharded where `shard` is more than 1; with `shard = 1` every choice is plain data parallelism.",
       .choices = {"none", "optimizer", "gradients", "parameters"}},
      {.name = "layout.offload",
       .field = FIELD(layout.offload),
       .help = "What is kept in the host's memory.",
       .choices = {"none"},
       .later = "offloading"},
      {.name = "layout.recompute",
       .field = FIELD(layout.recompute),
       .help = "What is computed again in backward instead of kept.",
       .choices = {"none"},
       .later = "recomputation"},
      {.name = "layout.bucket_mb",
       .field = FIELD(layout.bucket_mb),
       .help = "MiB of gradients that are reduced together.",
       .range = {.more_than = 0}},
      {.name = "layout.first_bucket_mb",
       .field = FIELD(layout.first_bucket_mb),
       .help = "MiB of the first bucket; small, so that communication starts early.",
       .range = {.more_than = 0}},
      {.name = "layout.compression",
       .field = FIELD(layout.compression),
       .help = "How gradients travel: as they are, rounded to 16 bits, or as products of two thin matrices (PowerSGD, with "
               "error feedback).",
       .choices = {"none", "bf16", "fp16", "powersgd"}},
      {.name = "layout.powersgd_rank",
       .field = FIELD(layout.powersgd_rank),
       .help = "Columns of PowerSGD's matrices.",
       .range = {.at_least = 1},
       .where_key = "layout.compression",
       .where_values = {"powersgd"}},

      {.name = "fault.nan_step",
       .field = FIELD(fault.nan_step),
       .help = "Step at which the loss of one rank becomes NaN. 0: never.",
       .range = {.at_least = 0}},
      {.name = "fault.nan_rank",
       .field = FIELD(fault.nan_rank),
       .help = "The rank whose loss it is.",
       .range = {.at_least = 0}},
  };
  return keys;
}

const std::vector<LaterKey>& later_keys() {
  static const std::vector<LaterKey> keys = {
      {"model.reversible", "reversible blocks"},
      {"model.from", "importing Hugging Face folders"},
      {"layout.sequence_parallel", "tensor parallelism"},
      {"layout.reshard_after_forward", "sharding"},
      {"layout.prefetch", "sharding"},
      {"layout.schedule", "pipeline parallelism"},
      {"layout.chunks", "pipeline parallelism"},
      {"layout.recompute_every", "recomputation"},
      {"layout.stages", "pipeline parallelism"},
      {"layout.server", "the parameter server"},
      {"checkpoint.every", "checkpoints"},
      {"checkpoint.keep", "checkpoints"},
      {"checkpoint.asynchronous", "checkpoints"},
  };
  return keys;
}

const std::string& help_of_section(const std::string& section) {
  static const std::map<std::string, std::string> help = {
      {"run", "The run itself: its folder, its device, its patience."},
      {"model", "What is trained."},
      {"data", "What it is trained on."},
      {"train", "How long, in what portions and in what precision."},
      {"optimizer", "The update and the learning rate."},
      {"layout",
       "How the ranks are laid out; the product of the five axes is the number of ranks. Where no axis is given, "
       "`replicate` is the number of ranks."},
      {"fault", "Faults to inject, for tests of what a run does about them. Not for real runs."},
  };
  return help.at(section);
}

std::vector<std::string> config_sections() {
  std::vector<std::string> sections;
  for (const auto& key : config_keys()) {
    if (sections.empty() || sections.back() != key.section()) sections.push_back(key.section());
  }
  return sections;
}

std::vector<std::string> keys_of_section(const std::string& section) {
  std::vector<std::string> keys;
  for (const auto& key : config_keys()) {
    if (key.section() == section) keys.push_back(key.key());
  }
  return keys;
}

const ConfigKey* find_key(const std::string& name) {
  const auto& keys = config_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

std::string allowed_text(const ConfigKey& key) {
  static constexpr const char* types[] = {
      "true or false",      "an integer",           "a number", "a string", "a list of strings",
      "a list of integers", "a list of two numbers"};
  if (!key.choices.empty()) {
    std::string text;
    for (const auto& choice : key.choices) text += (text.empty() ? "" : " | ") + (choice.empty() ? "\"\"" : choice);
    return text;
  }
  std::string text = types[key.field.index()];
  const auto limit = [&](const char* words, const std::optional<double>& value) {
    if (value) text += fmt::format(", {} {}", words, *value);
  };
  const auto& range = key.range;
  if (range.at_least && range.at_most && *range.at_least == *range.at_most) return fmt::format("{}", *range.at_least);
  limit("at least", range.at_least);
  limit("more than", range.more_than);
  limit("at most", range.at_most);
  limit("less than", range.less_than);
  return text;
}

namespace {

TomlValue as_toml(bool value) { return {.is = value}; }
TomlValue as_toml(std::int64_t value) { return {.is = value}; }
TomlValue as_toml(double value) { return {.is = value}; }
TomlValue as_toml(const std::string& value) { return {.is = value}; }
template <class List>
TomlValue as_toml(const List& list) {
  TomlArray items;
  for (const auto& item : list) items.push_back(as_toml(item));
  return {.is = std::move(items)};
}

}  // namespace

TomlValue value_of(const ConfigKey& key, const Config& config) {
  // The fields are reached through a mutable Config; nothing is written here.
  return std::visit([&](auto field) { return as_toml(field(const_cast<Config&>(config))); }, key.field);
}

bool applies(const ConfigKey& key, const Config& config) {
  if (key.where_key.empty()) return true;
  const ConfigKey* other = find_key(key.where_key);
  const auto value = std::get<std::string>(value_of(*other, config).is);
  return std::find(key.where_values.begin(), key.where_values.end(), value) != key.where_values.end();
}

}  // namespace bonfire
