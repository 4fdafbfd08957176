#include <algorithm>
#include <filesystem>
#include <numeric>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/pipeline/tied.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"

namespace bonfire {

bool runs_pipedream(const Config& config) { return schedule::weight_mode(config.layout.schedule).has_value(); }

schedule::RoundRobin robin_of(const Config& config) {
  const auto& layout = config.layout;
  schedule::RoundRobin robin{.replicas = {layout.replicas.begin(), layout.replicas.end()},
                             .mode = schedule::weight_mode(layout.schedule).value()};
  if (robin.replicas.empty()) robin.replicas.assign(static_cast<std::size_t>(layout.pipeline), 1);
  robin.microbatches = static_cast<int>(config.train.batch / config.train.microbatch);
  return robin;
}

void resolve_rounds(Config& config) {
  if (!runs_pipedream(config)) return;
  const auto robin = robin_of(config);
  std::int64_t round = 1;
  for (const std::int64_t replicas : robin.replicas) {
    round = std::lcm(round, replicas);
    // Refused later.
    if (round > most_without_drain(robin)) return;
  }
  if (robin.mode == schedule::WeightMode::two_buffers || robin.mode == schedule::WeightMode::flush) return;
  const auto whole = [&](const char* key, std::int64_t& steps) {
    if (!config.given(key)) steps = (steps + round - 1) / round * round;
  };
  whole("train.steps", config.train.steps);
  whole("checkpoint.every", config.checkpoint.every);
}

void require_whole_rounds(const Config& config, std::int64_t step, const std::string& checkpoint) {
  const auto round = robin_of(config).round();
  if (step % round == 0) return;
  fail_key(config, "layout.replicas",
           fmt::format("have whole rounds after {} minibatches, and the checkpoint in '{}' is of step {}; allowed: replicas "
                       "whose rounds divide it, or another checkpoint",
                       round, checkpoint, step));
}

void check_no_pipedream(const Config& config) {
  const auto allowed = fmt::format("allowed with: layout.schedule = {}", fmt::join(schedule::pipedream_names(), " | "));
  if (!config.layout.replicas.empty())
    fail_key(config, "layout.replicas",
             fmt::format("layout.schedule = \"{}\" has one rank for each stage of a pipeline; {}", config.layout.schedule,
                         allowed));
  if (!config.layout.stash)
    fail_key(config, "layout.stash",
             fmt::format("layout.schedule = \"{}\" has no versions to stash; allowed with: layout.schedule = pipedream",
                         config.layout.schedule));
  if (!config.checkpoint.drain)
    fail_key(config, "checkpoint.drain",
             fmt::format("{} ends every step on all ranks, and there is nothing to drain; {}",
                         config.layout.pipeline > 1 ? fmt::format("layout.schedule = \"{}\"", config.layout.schedule)
                                                    : std::string("training without a pipeline"),
                         allowed));
}

namespace {

// Only after whole rounds of all replicas has every stage been updated with the same minibatches.
void require_rounds(const Config& config, int round) {
  const std::pair<const char*, std::int64_t> steps[] = {{"train.steps", config.train.steps},
                                                        {"train.eval_every", config.train.eval_every},
                                                        {"checkpoint.every", config.checkpoint.every}};
  for (const auto& [key, count] : steps)
    if (count % round != 0)
      fail_key(
          config, key,
          fmt::format("all stages must have had the same minibatches there, and layout.replicas = [{}] have whole rounds "
                      "after {}; allowed: a multiple of {}",
                      fmt::join(config.layout.replicas, ", "), round, round));
}

// Numbers of microbatches begin anew when the pipeline has run empty.
void require_drains(const Config& config, const schedule::RoundRobin& robin) {
  auto longest = config.train.steps;
  const auto drained_to_save = config.checkpoint.drain ? config.checkpoint.every : 0;
  for (const auto every : {config.train.eval_every, drained_to_save})
    if (every > 0) longest = std::min(longest, every);
  const auto most = most_without_drain(robin);
  if (longest > most)
    fail_key(
        config, "train.steps",
        fmt::format("the pipeline runs for {} minibatches without running empty; allowed: up to {}, or train.eval_every, "
                    "or checkpoint.every with checkpoint.drain = true",
                    longest, most));
}

// What another way of training decides.
void require_plain(const Config& config) {
  const auto& layout = config.layout;
  const Config::Layout plain;
  const auto name = layout.schedule;
  const std::pair<const char*, bool> other[] = {{"layout.replicate", layout.replicate != 1},
                                                {"layout.shard", layout.shard != 1},
                                                {"layout.context", layout.context != 1},
                                                {"layout.tensor", layout.tensor != 1},
                                                {"layout.chunks", layout.chunks > 1}};
  for (const auto& [key, asked] : other)
    if (asked)
      fail_key(
          config, key,
          fmt::format("with layout.schedule = \"{}\" a rank holds one whole stage, and layout.replicas says how many do; "
                      "allowed: 1",
                      name));
  if (layout.stages == WordOrCounts("measured"))
    fail_key(
        config, "layout.stages",
        fmt::format("layout.schedule = \"{}\" takes stages from bonfire partition, which measures Units; allowed: count | "
                    "a list",
                    name));
  if (!layout.stash && (layout.recompute != "none" || config.model.spec.reversible))
    fail_key(
        config, "layout.stash",
        fmt::format("{} makes activations again in backward, where other weights are without stashing; allowed with it: "
                    "true",
                    layout.recompute != "none" ? fmt::format("layout.recompute = \"{}\"", layout.recompute)
                                               : "model.reversible = true"));
  const std::pair<const char*, bool> unknown[] = {
      {"layout.offload", layout.offload != "none"},
      {"layout.compression", layout.compression != "none"},
      {"layout.negotiate_order", layout.negotiate_order},
      {"layout.wrap", layout.wrap != plain.wrap},
      {"layout.wrap_types", !layout.wrap_types.empty()},
      {"layout.ignore", !layout.ignore.empty()},
      {"layout.backward_prefetch", layout.backward_prefetch != plain.backward_prefetch},
      {"run.debug_parameters", config.run.debug_parameters}};
  for (const auto& [key, asked] : unknown)
    if (asked) fail_key(config, key, fmt::format("does not go with layout.schedule = \"{}\"; allowed: the default", name));
  if (config.train.precision == "fp16" || config.train.precision == "fp8")
    fail_key(
        config, "train.precision",
        fmt::format("scales are found in steps, which overlap with layout.schedule = \"{}\"; allowed with it: fp32 | bf16",
                    name));
  if (config.train.reduction_precision != "gradient")
    fail_key(config, "train.reduction_precision",
             fmt::format("does not go with layout.schedule = \"{}\"; allowed: gradient", name));
  if (config.train.nan_policy != "stop")
    fail_key(config, "train.nan_policy",
             fmt::format("other minibatches have been trained with when one is known not to be finite (layout.schedule = "
                         "\"{}\"); allowed with it: stop",
                         name));
  if (!layout.stash && layout.schedule != "pipedream")
    fail_key(
        config, "layout.stash",
        fmt::format("layout.schedule = \"{}\" is about which version a minibatch sees, and without stashing there are none "
                    "to hold; allowed with it: true",
                    name));
}

}  // namespace

void check_pipedream(const Config& config) {
  const auto& layout = config.layout;
  if (!layout.replicas.empty() && static_cast<std::int64_t>(layout.replicas.size()) != layout.pipeline)
    fail_key(config, "layout.replicas",
             fmt::format("replicas of {} stages, and layout.pipeline = {}; allowed: a number for each stage",
                         layout.replicas.size(), layout.pipeline));
  require_plain(config);
  const auto robin = robin_of(config);
  const auto blame = [&](const char* key, const auto& check) {
    try {
      check();
    } catch (const ConfigError& error) {
      fail_key(config, key, error.what());
    }
  };
  blame("layout.schedule", [&] {
    split_evenly(static_cast<int>(plan::chain_of(model_of(config)).size()), static_cast<int>(layout.pipeline));
    pipedream_table(robin);
  });
  std::vector<UnitRange> stages;
  blame("layout.stages", [&] { stages = stages_of(config, static_cast<int>(layout.pipeline)); });
  if (!tie_groups(units_of(model_of(config)), stages).empty())
    fail_key(
        config, "layout.pipeline",
        fmt::format("model.tied = true: the first and the last stage share a weight, and are updated at different times "
                    "(layout.schedule = \"{}\"); allowed: model.tied = false, or one stage",
                    layout.schedule));
  require_rounds(config, robin.round());
  require_drains(config, robin);
}

}  // namespace bonfire
