#include <algorithm>
#include <cctype>
#include <filesystem>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/config.h"
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
  const char* first_given = nullptr;
  for (const char* axis : axes) {
    if (!first_given && config.given(axis)) first_given = axis;
  }
  if (!first_given) config.layout.replicate = ranks;
  if (config.ranks() == ranks) return;
  const auto& l = config.layout;
  fail_key(
      config, first_given,
      fmt::format("pipeline {} x replicate {} x shard {} x context {} x tensor {} = {} ranks, but there are {}; allowed: "
                  "axes whose product is {}, such as {}",
                  l.pipeline, l.replicate, l.shard, l.context, l.tensor, config.ranks(), ranks, ranks,
                  fmt::join(products_for(ranks), " or ")));
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

void resolve_model(Config& config) {
  auto& spec = config.model.spec;
  if (!config.model.preset.empty() &&
      plan::published_model(config.model.preset).type != plan::model_type(config.model.type)) {
    fail_key(config, "model.type",
             fmt::format("model.preset = \"{}\" is of another type; allowed with it: {}", config.model.preset,
                         plan::name_of(plan::published_model(config.model.preset).type)));
  }
  spec.type = plan::model_type(config.model.type);
  const bool attends = config.model.type == "llama" || config.model.type == "gpt2";
  if (attends && spec.positions == 0) spec.positions = config.data.sequence;
  if (attends && config.data.sequence > spec.positions) {
    fail_key(config, "data.sequence",
             fmt::format("the model has model.positions = {}; allowed: at most that", spec.positions));
  }
  try {
    spec = plan::resolve(spec);
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
  if (optimizer.type == "sgd" && optimizer.nesterov && optimizer.momentum == 0) {
    fail_key(config, "optimizer.nesterov", "needs momentum; allowed with: optimizer.momentum more than 0");
  }
}

void check_steps(const Config& config) {
  const auto& train = config.train;
  if (train.trace_steps > 0 && train.trace_from + train.trace_steps - 1 > train.steps) {
    fail_key(config, "train.trace_steps",
             fmt::format("steps {} to {} are not all in the run of {} steps (train.steps); allowed from step {}: at most {}",
                         train.trace_from, train.trace_from + train.trace_steps - 1, train.steps, train.trace_from,
                         std::max<std::int64_t>(0, train.steps - train.trace_from + 1)));
  }
  if (config.fault.nan_step > train.steps) {
    fail_key(config, "fault.nan_step", fmt::format("the run has {} steps; allowed: 0 to {}", train.steps, train.steps));
  }
  if (config.fault.nan_rank >= config.ranks()) {
    fail_key(config, "fault.nan_rank",
             fmt::format("there are {} ranks; allowed: 0 to {}", config.ranks(), config.ranks() - 1));
  }
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

// A schedule decides what seams would, and a stage has only some of the model's Units.
void check_pipeline(const Config& config) {
  const auto& layout = config.layout;
  const Config::Layout plain;
  if (layout.pipeline == 1) {
    const std::pair<const char*, bool> of_pipelines[] = {{"layout.schedule", layout.schedule != plain.schedule},
                                                         {"layout.chunks", layout.chunks != plain.chunks},
                                                         {"layout.stages", layout.stages != plain.stages}};
    for (const auto& [key, asked] : of_pipelines)
      if (asked) fail_key(config, key, "there is no pipeline; allowed with: layout.pipeline of 2 or more");
    return;
  }
  const std::pair<const char*, bool> by_seams[] = {
      {"layout.reshard_after_forward", layout.reshard_after_forward != plain.reshard_after_forward},
      {"layout.backward_prefetch", layout.backward_prefetch != plain.backward_prefetch},
      {"layout.negotiate_order", layout.negotiate_order},
      {"layout.wrap", layout.wrap != plain.wrap},
      {"layout.wrap_types", !layout.wrap_types.empty()},
      {"layout.ignore", !layout.ignore.empty()}};
  for (const auto& [key, asked] : by_seams)
    if (asked)
      fail_key(config, key, "the schedule of a pipeline says when stages are gathered; allowed with: layout.pipeline = 1");
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
  resolve_batch(config);
  resolve_model(config);
  check_sharding(config);
  check_pipeline(config);
  check_precision(config);
  // Whether there is a GPU is found out later.
  wants_graphs(config, c10::kCUDA);
  check_selections(config);
  check_optimizer(config);
  check_steps(config);
  check_data(config);
}

}  // namespace bonfire
