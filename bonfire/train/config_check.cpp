#include <algorithm>
#include <cctype>
#include <filesystem>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/plan/activations.h"
#include "bonfire/plan/tensor_part.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/config.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"

// What no key can be judged for alone: the keys against each other, against the number of ranks and against the disk.
namespace bonfire {
namespace {

constexpr const char* axes[] = {"layout.pipeline", "layout.replicate", "layout.shard", "layout.context", "layout.tensor"};

// replicate x shard for so many ranks: at most a few.
std::vector<std::string> products_for(std::int64_t ranks) {
  std::vector<std::string> products;
  for (std::int64_t shard = 1; shard <= std::min<std::int64_t>(ranks, 1024); ++shard)
    if (ranks % shard == 0) products.push_back(fmt::format("replicate {} x shard {}", ranks / shard, shard));
  constexpr std::size_t most = 4;
  if (products.size() > most) products.erase(products.begin() + most - 1, products.end() - 1);
  return products;
}

void resolve_ranks(Config& config, std::int64_t ranks) {
  const char* first_given = config.layout.replicas.empty() ? nullptr : "layout.replicas";
  for (const char* axis : axes)
    if (!first_given && config.given(axis)) first_given = axis;
  const auto servers = config.layout.server;
  if (servers > 0 && servers >= ranks)
    fail_key(config, "layout.server",
             fmt::format("there are {} ranks, and the others are the workers; allowed: 0 to {}", ranks, ranks - 1));
  if (!first_given) config.layout.replicate = ranks - servers;
  if (config.ranks() == ranks) return;
  const auto& l = config.layout;
  if (!l.replicas.empty())
    fail_key(
        config, "layout.replicas",
        fmt::format("{} ranks in all, but there are {}; allowed: replicas whose sum is {}", config.ranks(), ranks, ranks));
  fail_key(
      config, first_given,
      fmt::format("pipeline {} x replicate {} x shard {} x context {} x tensor {}{} = {} ranks, but there are {}; allowed: "
                  "axes whose product is {}, such as {}",
                  l.pipeline, l.replicate, l.shard, l.context, l.tensor,
                  servers == 0 ? "" : fmt::format(" + {} parameter server{}", servers, servers == 1 ? "" : "s"),
                  config.ranks(), ranks, ranks - servers, fmt::join(products_for(ranks - servers), " or ")));
}

// A worker is a rank alone with whole weights, and its servers do the rest.
void check_server(const Config& config) {
  const auto& layout = config.layout;
  const auto& train = config.train;
  if (layout.server == 0) {
    // The file that a run leaves has them all, with their defaults.
    const Config::Layout plain;
    const std::pair<const char*, bool> of_servers[] = {
        {"layout.server_mode", layout.server_mode != plain.server_mode},
        {"layout.server_staleness", layout.server_staleness != plain.server_staleness},
        {"layout.server_backup", layout.server_backup != plain.server_backup},
        {"layout.server_lost", layout.server_lost != plain.server_lost},
        {"layout.server_save_every", layout.server_save_every != plain.server_save_every}};
    for (const auto& [key, asked] : of_servers)
      if (asked) fail_key(config, key, "there is no parameter server; allowed with: layout.server of 1 or more");
    return;
  }
  const auto refuse = [&](bool asked, const char* key, const std::string& allowed) {
    if (asked)
      fail_key(config, key,
               fmt::format("beside a parameter server (layout.server = {}); allowed: {}", layout.server, allowed));
  };
  refuse(layout.pipeline > 1, "layout.pipeline", "1");
  refuse(runs_pipedream(config), "layout.schedule", "another: there is no pipeline");
  refuse(layout.shard > 1, "layout.shard", "1: workers have whole weights, and servers the optimizer");
  refuse(layout.tensor > 1, "layout.tensor", "1");
  refuse(layout.context > 1, "layout.context", "1");
  refuse(layout.recompute != "none", "layout.recompute", "none");
  refuse(config.model.spec.adapter.rank > 0, "adapter.rank", "0");
  refuse(config.data.documents == "separate", "data.documents", "joined");
  refuse(layout.offload != "none", "layout.offload", "none: servers are in host memory");
  refuse(layout.compression == "powersgd", "layout.compression", "none | bf16 | fp16");
  refuse(!layout.ignore.empty(), "layout.ignore", "nothing");
  refuse(!train.freeze.empty(), "train.freeze", "nothing");
  refuse(train.precision == "fp16" || train.precision == "fp8", "train.precision", "fp32 | bf16");
  refuse(train.reduction_precision != "gradient", "train.reduction_precision", "gradient, or layout.compression");
  refuse(train.eval_every > 0, "train.eval_every", "0");
  refuse(train.trace_steps > 0, "train.trace_steps", "0");
  refuse(train.nan_policy == "rollback", "train.nan_policy", "stop | skip");
  refuse(!config.checkpoint.weights.empty(), "checkpoint.weights", "nothing, or --resume");
  refuse(config.fault.nan_step > 0, "fault.nan_step", "0");
  refuse(config.fault.memory_step > 0, "fault.memory_step", "0");
  if (layout.server_backup >= layout.replicate)
    fail_key(
        config, "layout.server_backup",
        fmt::format("an update takes the gradients of the other workers, and there are {} (layout.replicate); allowed: 0 "
                    "to {}",
                    layout.replicate, layout.replicate - 1));
}

void resolve_batch(Config& config) {
  auto& train = config.train;
  const std::int64_t ranks = config.data_ranks();
  if (train.batch % ranks != 0) {
    fail_key(config, "train.batch",
             fmt::format("{} data-parallel ranks do not divide it; allowed: a multiple of {}, such as {}", ranks, ranks,
                         (train.batch / ranks + 1) * ranks));
  }
  const std::int64_t part = train.batch / ranks;
  if (train.microbatch == 0) train.microbatch = part;
  if (part % train.microbatch != 0) {
    fail_key(
        config, "train.microbatch",
        fmt::format("does not divide the {} samples of one rank (train.batch = {} over {} data-parallel ranks); allowed: "
                    "a divisor of {}",
                    part, train.batch, ranks, part));
  }
}

bool attends(const Config& config) { return config.model.type == "llama" || config.model.type == "gpt2"; }

void resolve_model(Config& config) {
  auto& spec = config.model.spec;
  if (!config.model.preset.empty() &&
      plan::published_model(config.model.preset).type != plan::model_type(config.model.type)) {
    fail_key(config, "model.type",
             fmt::format("model.preset = \"{}\" is of another type; allowed with it: {}", config.model.preset,
                         plan::name_of(plan::published_model(config.model.preset).type)));
  }
  spec.type = plan::model_type(config.model.type);
  if (attends(config) && spec.positions == 0) spec.positions = config.data.sequence;
  if (attends(config) && config.data.sequence > spec.positions) {
    fail_key(config, "data.sequence",
             fmt::format("the model has model.positions = {}; allowed: at most that", spec.positions));
  }
  try {
    spec = plan::resolve(spec);
    plan::describe(spec);
  } catch (const ConfigError& error) {
    // It names the key first; the place in the file is ours to say.
    const std::string what = error.what();
    const auto origin = config.origin.find(what.substr(0, what.find(' ')));
    fail_config("{}: {}", origin == config.origin.end() ? config.file : origin->second, what);
  }
}

void check_run(const Config& config) {
  const std::string& name = config.run.name;
  bool plain = !name.empty() && name.front() != '.' && name.front() != '-';
  for (const char c : name)
    plain = plain && (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.');
  if (!plain) {
    fail_key(config, "run.name", "cannot name a folder; allowed: letters, digits, '_', '-' and '.', not first '-' or '.'");
  }
  if (config.run.folder.empty()) fail_key(config, "run.folder", "is empty; allowed: a path");
}

void check_data(const Config& config) {
  if (config.data.type != "tokens") return;
  if (!config.reads_tokens()) {
    fail_key(config, "data.type",
             fmt::format("model.type = \"{}\" does not read tokens; allowed: synthetic", config.model.type));
  }
  if (config.data.paths.empty()) {
    fail_key(config, "data.paths", "data.type = \"tokens\" needs token files; allowed: a list of at least one path");
  }
  for (const auto& path : config.data.paths) {
    // Megatron's pair of files may be named by what they have in common.
    if (std::filesystem::exists(path) || std::filesystem::exists(path + ".bin")) continue;
    fail_key(config, "data.paths",
             fmt::format("there is no file \"{}\" (from {}); allowed: token files that exist", path,
                         std::filesystem::current_path().string()));
  }
}

void check_optimizer(const Config& config) {
  const auto& optimizer = config.optimizer;
  if (optimizer.decay != "constant" && optimizer.min_lr > optimizer.lr) {
    fail_key(config, "optimizer.min_lr",
             fmt::format("is more than optimizer.lr = {}; allowed: 0 to {}", optimizer.lr, optimizer.lr));
  }
  if (optimizer.type == "sgd" && optimizer.nesterov && optimizer.momentum == 0)
    fail_key(config, "optimizer.nesterov", "needs momentum; allowed with: optimizer.momentum more than 0");
}

void check_steps(const Config& config) {
  const auto& train = config.train;
  if (train.trace_steps > 0 && train.trace_from + train.trace_steps - 1 > train.steps) {
    fail_key(config, "train.trace_steps",
             fmt::format("steps {} to {} are not all in the run of {} steps (train.steps); allowed from step {}: at most {}",
                         train.trace_from, train.trace_from + train.trace_steps - 1, train.steps, train.trace_from,
                         std::max<std::int64_t>(0, train.steps - train.trace_from + 1)));
  }
  for (const auto& [key, step] :
       {std::pair("fault.nan_step", config.fault.nan_step), std::pair("fault.memory_step", config.fault.memory_step)})
    if (step > train.steps)
      fail_key(config, key, fmt::format("the run has {} steps; allowed: 0 to {}", train.steps, train.steps));
  if (train.nan_policy == "rollback" && config.checkpoint.every == 0) {
    fail_key(
        config, "train.nan_policy",
        "there is no checkpoint to go back to with checkpoint.every = 0; allowed: stop | skip, or checkpoint.every of 1 "
        "or more");
  }
  for (const auto& [key, rank] :
       {std::pair("fault.nan_rank", config.fault.nan_rank), std::pair("fault.memory_rank", config.fault.memory_rank)})
    if (rank >= config.ranks())
      fail_key(config, key, fmt::format("there are {} ranks; allowed: 0 to {}", config.ranks(), config.ranks() - 1));
}

void check_sharding(const Config& config) {
  const auto& layout = config.layout;
  if (layout.shard > 1 && layout.sharded == "none") {
    fail_key(config, "layout.sharded",
             fmt::format("nothing would be sharded over layout.shard = {} ranks; allowed: optimizer | gradients | "
                         "parameters, or layout.shard = 1",
                         layout.shard));
  }
  const auto* reshard = std::get_if<std::int64_t>(&layout.reshard_after_forward);
  if (reshard && layout.shard % *reshard != 0) {
    fail_key(config, "layout.reshard_after_forward",
             fmt::format("does not divide layout.shard = {}; allowed: true | false | a divisor of {}", layout.shard,
                         layout.shard));
  }
  if (layout.compression == "powersgd" && layout.shard > 1) {
    fail_key(config, "layout.compression",
             fmt::format("PowerSGD needs whole matrices, but layout.shard = {} cuts them; allowed: none | bf16 | fp16, or "
                         "layout.shard = 1",
                         layout.shard));
  }
  if (layout.offload == "parameters" && layout.shard > 1 && layout.sharded != "parameters") {
    fail_key(config, "layout.offload",
             fmt::format("parameters that are not sharded (layout.sharded = \"{}\") stay whole on every rank; allowed: none "
                         "| optimizer, or layout.sharded = parameters",
                         layout.sharded));
  }
  if (layout.wrap == WordOrNumber("all") && !layout.wrap_types.empty()) {
    fail_key(config, "layout.wrap_types", "has no meaning with layout.wrap = \"all\"; allowed with: unit | a number");
  }
}

// Ranks that split the layers.
void check_tensor(const Config& config) {
  const auto& layout = config.layout;
  if (layout.tensor == 1 && layout.tensor_chunks > 1)
    fail_key(config, "layout.tensor_chunks", "no layer is split with layout.tensor = 1; allowed: 1");
  if (layout.tensor == 1) return;
  const auto part = tensor_part_of(config);
  try {
    plan::require_splits(config.model.spec, part);
  } catch (const ConfigError& error) {
    fail_key(config, "layout.tensor", error.what());
  }
  if (part.sequence && config.data.sequence % layout.tensor != 0)
    fail_key(
        config, "layout.tensor",
        fmt::format("does not divide data.sequence = {}, which layout.sequence_parallel does; allowed: a divisor of it, "
                    "or layout.sequence_parallel = false",
                    config.data.sequence));
  if (config.train.precision == "fp8")
    fail_key(config, "train.precision",
             fmt::format("layout.tensor = {}: products of split weights are not made in fp8; allowed with it: fp32 | bf16 | "
                         "fp16",
                         layout.tensor));
  if (layout.compression == "powersgd")
    fail_key(config, "layout.compression",
             fmt::format("PowerSGD needs whole matrices, but layout.tensor = {} splits them; allowed: none | bf16 | fp16",
                         layout.tensor));
  if (layout.stages == WordOrCounts("measured"))
    fail_key(config, "layout.stages",
             fmt::format("the Units of a rank are measured by themselves, but those of layout.tensor = {} run together; "
                         "allowed: count | a list",
                         layout.tensor));
}

void check_recompute(const Config& config) {
  const auto& what = config.layout.recompute;
  if (what == "selective" && !plan::recomputes_in_part(config.model.spec.type))
    fail_key(config, "layout.recompute",
             fmt::format("model.type = \"{}\" has no activation between two products; allowed with it: none | full",
                         config.model.type));
  if (what != "none" && config.model.spec.reversible)
    fail_key(config, "layout.recompute",
             "the blocks keep nothing for backward already (model.reversible = true); allowed with it: none");
  if (what == "selective" && config.model.spec.adapter.rank > 0)
    fail_key(config, "layout.recompute",
             fmt::format("adapters keep what goes into the activation (adapter.rank = {}); allowed with them: none | full",
                         config.model.spec.adapter.rank));
  if (what == "selective" && (config.layout.context > 1 || config.data.documents == "separate"))
    fail_key(
        config, "layout.recompute",
        "attention over parts of a sample (layout.context, data.documents) does not make q, k and v again; allowed with "
        "it: none | full");
  if (config.layout.recompute_offload && config.layout.pipeline > 1)
    fail_key(
        config, "layout.recompute_offload",
        fmt::format("the host memory of a pipeline's microbatches is not predicted (layout.pipeline = {}); allowed: false, "
                    "or layout.pipeline = 1",
                    config.layout.pipeline));
  if (what != "full") return;
  if (config.train.keep_for_backward != "least")
    fail_key(config, "layout.recompute",
             fmt::format("train.keep_for_backward = \"{}\" would be kept of what is made again; allowed with it: none | "
                         "selective, or train.keep_for_backward = \"least\"",
                         config.train.keep_for_backward));
}

// Ranks that share samples.
void check_context(const Config& config) {
  const auto& layout = config.layout;
  const std::int64_t ranks = layout.context, sequence = config.data.sequence;
  if (ranks == 1) return;
  if (!attends(config))
    fail_key(config, "layout.context",
             fmt::format("model.type is \"{}\", whose samples are not divided along a sequence; allowed: llama | gpt2",
                         config.model.type));
  if (sequence % (2 * ranks) != 0)
    fail_key(config, "layout.context",
             fmt::format("data.sequence = {} cannot be cut into {} chunks, two for each rank; allowed: a multiple of {}",
                         sequence, 2 * ranks, 2 * ranks));
  if (config.model.spec.reversible)
    fail_key(config, "layout.context",
             "blocks that make their inputs again in backward (model.reversible = true) cannot ask other ranks for keys and "
             "values; allowed with them: 1");
  if (config.model.spec.adapter.rank > 0 && config.model.spec.adapter.dropout > 0)
    fail_key(config, "adapter.dropout",
             fmt::format("layout.context = {} divides what adapters read among ranks; allowed with it: 0", ranks));
  const auto part = tensor_part_of(config);
  if (part.sequence && sequence / ranks % part.ranks != 0)
    fail_key(config, "layout.context",
             fmt::format("a rank's {} positions (data.sequence / context) are divided among layout.tensor = {} ranks by "
                         "layout.sequence_parallel; allowed: a multiple of {}, or layout.sequence_parallel = false",
                         sequence / ranks, part.ranks, part.ranks));
  if (layout.context_attention == "heads") {
    const auto [heads, kv_heads, sharing] = plan::heads_of(config.model.spec, part);
    for (const auto& [key, count] : {std::pair("model.heads", heads), std::pair("model.kv_heads", kv_heads)})
      if (count % ranks != 0)
        fail_key(config, "layout.context_attention",
                 fmt::format("{} gives a rank {}, which layout.context = {} does not divide; allowed: ring, or a multiple "
                             "of {}",
                             key, count, ranks, ranks));
  }
  if (layout.stages == WordOrCounts("measured"))
    fail_key(config, "layout.stages",
             fmt::format("the Units of a rank are measured by themselves, but those of layout.context = {} run together; "
                         "allowed: count | a list",
                         ranks));
}

void check_documents(const Config& config) {
  if (config.data.documents != "separate") return;
  if (!attends(config))
    fail_key(config, "data.documents",
             fmt::format("model.type is \"{}\", which does not attend from one token to another; allowed: joined",
                         config.model.type));
  if (config.data.end_of_document >= config.model.spec.vocab)
    fail_key(
        config, "data.end_of_document",
        fmt::format("the vocabulary has {} tokens; allowed: 0 to {}", config.model.spec.vocab, config.model.spec.vocab - 1));
}

// In a pipeline whole stages are gathered, unless something else is said.
void resolve_gathers(Config& config) {
  auto& layout = config.layout;
  if (layout.pipeline > 1 && layout.sharded == "parameters" && !config.given("layout.reshard_after_forward"))
    layout.reshard_after_forward = false;
}

// A schedule decides what seams would.
void check_pipeline(const Config& config) {
  const auto& layout = config.layout;
  const Config::Layout plain;
  if (runs_pipedream(config)) return check_pipedream(config);
  check_no_pipedream(config);
  if (layout.pipeline == 1) {
    const std::pair<const char*, bool> of_pipelines[] = {{"layout.schedule", layout.schedule != plain.schedule},
                                                         {"layout.chunks", layout.chunks != plain.chunks},
                                                         {"layout.stages", layout.stages != plain.stages}};
    for (const auto& [key, asked] : of_pipelines)
      if (asked) fail_key(config, key, "there is no pipeline; allowed with: layout.pipeline of 2 or more");
    return;
  }
  if (std::holds_alternative<std::int64_t>(layout.reshard_after_forward))
    fail_key(config, "layout.reshard_after_forward",
             "in a pipeline parameters are gathered Unit by Unit or stage by stage; allowed: true | false");
  if (layout.backward_prefetch != plain.backward_prefetch && !gathers_units(config))
    fail_key(config, "layout.backward_prefetch",
             "the schedule of the pipeline says when stages are gathered; allowed with: layout.reshard_after_forward = "
             "true and layout.sharded = parameters, or layout.pipeline = 1");
  if (gathers_units(config) && config.model.spec.tied)
    fail_key(config, "layout.reshard_after_forward",
             "the memory of weights that several stages hold (model.tied = true) is only predicted where whole stages are "
             "gathered; allowed: false, or model.tied = false");
  if (config.run.debug_parameters && !gathers_units(config))
    fail_key(config, "run.debug_parameters",
             "all parameters of a stage are there while its Units run, so nothing would be checked; allowed with: "
             "layout.reshard_after_forward = true and layout.sharded = parameters, or layout.pipeline = 1");
  if (layout.negotiate_order)
    fail_key(config, "layout.negotiate_order",
             "the schedule of the pipeline runs the Units in one order on all ranks, so there is nothing to agree on; "
             "allowed: false, or layout.pipeline = 1");
  const std::pair<const char*, bool> unpredicted[] = {{"layout.wrap", layout.wrap != plain.wrap},
                                                      {"layout.wrap_types", !layout.wrap_types.empty()},
                                                      {"layout.ignore", !layout.ignore.empty()}};
  for (const auto& [key, asked] : unpredicted)
    if (asked)
      fail_key(config, key,
               "the memory of a pipeline is predicted for sharded Units as the model has them; allowed with: "
               "layout.pipeline = 1");
  const auto blame = [&](const char* key, const auto& check) {
    try {
      check();
    } catch (const ConfigError& error) {
      fail_key(config, key, error.what());
    }
  };
  const char* const table_key = config.given("layout.schedule") ? "layout.schedule" : "layout.pipeline";
  int stages = 0;
  blame(table_key, [&] {
    stages = schedule_of(config).stages;
    // Whatever the cut, each has a Unit.
    split_evenly(static_cast<int>(plan::chain_of(model_of(config)).size()), stages);
  });
  blame("layout.stages", [&] { stages_of(config, stages); });
  blame(table_key, [&] { table_of(config); });
}

void check_reversible(const Config& config) {
  if (!config.model.spec.reversible) return;
  if (config.train.precision == "fp8")
    fail_key(config, "train.precision",
             "backward makes the blocks' inputs again (model.reversible = true) and needs products that come out the same; "
             "allowed with it: fp32 | bf16 | fp16");
  if (config.train.keep_for_backward != "least")
    fail_key(config, "train.keep_for_backward",
             "the blocks keep nothing for backward (model.reversible = true); allowed with it: least");
}

void check_precision(const Config& config) {
  const auto& train = config.train;
  const std::string made = train.precision == "fp8" ? "bf16" : train.precision;
  if (train.gradient_precision != "fp32" && train.gradient_precision != made) {
    fail_key(config, "train.gradient_precision",
             train.precision == "fp32"
                 ? "gradients are made in train.precision = \"fp32\"; allowed with it: fp32"
                 : fmt::format("gradients are made in train.precision = \"{}\"; allowed with it: fp32 | {}", train.precision,
                               made));
  }
  if (train.reduction_precision != "gradient" && config.layout.compression != "none") {
    fail_key(config, "train.reduction_precision",
             fmt::format("layout.compression = \"{}\" says how gradients travel; allowed with it: gradient",
                         config.layout.compression));
  }
  if (train.gradient_precision != "fp32" && train.reduction_precision != "gradient" &&
      train.reduction_precision != train.gradient_precision) {
    fail_key(config, "train.reduction_precision",
             fmt::format("gradients are kept in train.gradient_precision = \"{}\"; allowed with it: gradient | {}",
                         train.gradient_precision, train.gradient_precision));
  }
  if (train.gradient_precision != "fp32" && config.layout.compression != "none") {
    fail_key(config, "layout.compression",
             fmt::format("gradients are kept in train.gradient_precision = \"{}\" already; allowed with it: none",
                         train.gradient_precision));
  }
}

}  // namespace

void resolve(Config& config, std::int64_t ranks) {
  check_run(config);
  resolve_ranks(config, ranks);
  check_server(config);
  resolve_batch(config);
  resolve_model(config);
  check_tensor(config);
  check_context(config);
  check_documents(config);
  check_sharding(config);
  resolve_gathers(config);
  resolve_rounds(config);
  check_pipeline(config);
  check_precision(config);
  check_recompute(config);
  check_reversible(config);
  // Whether there is a GPU is found out later.
  wants_graphs(config, c10::kCUDA);
  check_selections(config);
  check_optimizer(config);
  check_steps(config);
  check_data(config);
}

}  // namespace bonfire
