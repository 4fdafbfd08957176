#include <cctype>
#include <filesystem>

#include "bonfire/base/error.h"
#include "bonfire/train/config.h"

// What no key can be judged for alone: the keys against each other, against the number of ranks and against the disk.
namespace bonfire {
namespace {

constexpr const char* axes[] = {"layout.pipeline", "layout.replicate", "layout.shard", "layout.context", "layout.tensor"};

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
                  "axes whose product is {}",
                  l.pipeline, l.replicate, l.shard, l.context, l.tensor, config.ranks(), ranks, ranks));
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

}  // namespace

void resolve(Config& config, std::int64_t ranks) {
  check_run(config);
  resolve_ranks(config, ranks);
  resolve_batch(config);
  resolve_model(config);
  check_optimizer(config);
  check_steps(config);
  check_data(config);
}

}  // namespace bonfire
