#include <cstdio>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/output_file.h"
#include "bonfire/base/size.h"
#include "bonfire/plan/partition.h"
#include "bonfire/plan/profile.h"
#include "bonfire/train/config.h"
#include "bonfire/train/profile_model.h"
#include "cli/commands.h"

// PipeDream's partitioner: cuts a profiled model into stages and says on how many ranks each of them runs.
namespace bonfire::cli {
namespace {

struct PartitionArguments {
  std::string profile, model, cluster, schedule = "pipedream", memory, output, config;
  int microbatches = 0;
  bool json = false;
};

struct Answer {
  plan::Profile profile;
  plan::Topology topology;
  plan::Partition partition;
  schedule::WeightMode mode = schedule::WeightMode::stashing;
};

Answer answer(const PartitionArguments& arguments) {
  const auto mode = schedule::weight_mode(arguments.schedule);
  if (!mode) fail_config("--schedule '{}'; allowed: {}", arguments.schedule, fmt::join(schedule::pipedream_names(), ", "));
  Answer answer{.profile = plan::read_profile(arguments.profile, arguments.model),
                .topology = plan::parse_topology(arguments.cluster)};
  answer.mode = *mode;
  if (!arguments.config.empty()) {
    Config config = load_config(arguments.config);
    keep_units_alone(config);
    resolve(config, 1);
    require_same_model(answer.profile, arguments.profile, config);
  }
  if (!arguments.memory.empty()) {
    answer.topology.memory = parse_bytes(arguments.memory);
    if (!answer.topology.memory || *answer.topology.memory <= 0)
      fail_config("--memory '{}' is no size; allowed: bytes of a rank, such as 16GiB", arguments.memory);
  }
  answer.partition =
      plan::partition(answer.profile, answer.topology, {.mode = *mode, .microbatches = arguments.microbatches});
  return answer;
}

std::string units_of(const plan::Profile& profile, const plan::PartitionedStage& stage) {
  const auto name = [&](int unit) { return profile.units[static_cast<std::size_t>(unit)].name; };
  return stage.units.size() == 1 ? name(stage.units.front())
                                 : fmt::format("{} to {}", name(stage.units.front()), name(stage.units.back()));
}

void print_people(const PartitionArguments& arguments, const Answer& answer) {
  const auto& [profile, topology, partition, mode] = answer;
  const auto minibatch = profile.batch > 0 ? fmt::format(", minibatches of {} samples", profile.batch) : "";
  fmt::print("{}: {} Units{} on {} ranks, schedule {}\n\n", profile.model, profile.units.size(), minibatch, topology.ranks(),
             arguments.schedule);
  fmt::print("{:>5} {:>8} {:>10} {:>9} {:>8} {:>11}  {}\n", "stage", "replicas", "compute", "in flight", "versions",
             "memory", "Units");
  for (std::size_t at = 0; at < partition.stages.size(); ++at) {
    const auto& stage = partition.stages[at];
    fmt::print("{:>5} {:>8} {:>10} {:>9} {:>8} {:>11}  {} ({})\n", at, stage.replicas, format_seconds(stage.seconds),
               stage.in_flight, stage.versions, format_bytes(stage.memory.total()), stage.units.size(),
               units_of(profile, stage));
  }
  fmt::print("\na minibatch every {}", format_seconds(partition.seconds));
  if (profile.batch > 0) fmt::print(", {:.1f} samples/s", static_cast<double>(profile.batch) / partition.seconds);
  fmt::print("; {} admitted by each replica of the first stage\n", partition.in_flight);
  fmt::print("{:.2f} times one rank ({}), {:.2f} times data parallelism on all ranks ({})\n",
             partition.one_rank_seconds / partition.seconds, format_seconds(partition.one_rank_seconds),
             partition.data_parallel_seconds / partition.seconds, format_seconds(partition.data_parallel_seconds));
}

void print_json(const PartitionArguments& arguments, const Answer& answer) {
  const auto& [profile, topology, partition, mode] = answer;
  auto stages = nlohmann::ordered_json::array();
  int first = 0;
  for (const auto& stage : partition.stages) {
    const int last = first + static_cast<int>(stage.units.size()) - 1;
    auto names = nlohmann::ordered_json::array();
    for (const int unit : stage.units) names.push_back(profile.units[static_cast<std::size_t>(unit)].name);
    stages.push_back(
        {{"first", first},
         {"last", last},
         {"replicas", stage.replicas},
         {"in_flight", stage.in_flight},
         {"versions", stage.versions},
         {"compute_ms", 1e3 * stage.seconds},
         {"memory_bytes", stage.memory.total()},
         {"memory",
          {{"weights", stage.memory.weights}, {"state", stage.memory.state}, {"activations", stage.memory.activations}}},
         {"units", std::move(names)}});
    first = last + 1;
  }
  const nlohmann::ordered_json json{{"model", profile.model},
                                    {"schedule", arguments.schedule},
                                    {"ranks", topology.ranks()},
                                    {"stages", std::move(stages)},
                                    {"in_flight", partition.in_flight},
                                    {"microbatches", partition.microbatches},
                                    {"minibatch_ms", 1e3 * partition.seconds},
                                    {"data_parallel_ms", 1e3 * partition.data_parallel_seconds},
                                    {"one_rank_ms", 1e3 * partition.one_rank_seconds}};
  fmt::print("{}\n", json.dump());
}

// What other keys must be like.
std::string needs_of(const Answer& answer) {
  const auto& partition = answer.partition;
  std::int64_t round = 1;
  for (const auto& stage : partition.stages) round = std::lcm(round, std::int64_t{stage.replicas});
  const std::string steps =
      round == 1
          ? ""
          : fmt::format("# train.steps, train.eval_every and checkpoint.every: multiples of {}, where they are given\n",
                        round);
  const bool shares = answer.mode == schedule::WeightMode::two_buffers || answer.mode == schedule::WeightMode::flush;
  return shares ? fmt::format("# train.batch / train.microbatch: {} microbatches\n", partition.microbatches) : steps;
}

// The keys of a configuration that runs it.
std::string layout_of(const PartitionArguments& arguments, const Answer& answer) {
  const auto& [profile, topology, partition, mode] = answer;
  std::vector<std::size_t> units;
  std::vector<int> replicas;
  for (const auto& stage : partition.stages) {
    units.push_back(stage.units.size());
    replicas.push_back(stage.replicas);
  }
  return fmt::format(
      "# {} on {} ranks: bonfire partition {} --cluster {}\n{}[layout]\nschedule = \"{}\"\npipeline = {}\nstages = [{}]\n"
      "replicas = [{}]\n",
      profile.model, topology.ranks(), std::filesystem::path(arguments.profile).filename().string(), arguments.cluster,
      needs_of(answer), arguments.schedule, units.size(), fmt::join(units, ", "), fmt::join(replicas, ", "));
}

void write_layout(const PartitionArguments& arguments, const Answer& answer) {
  if (!answer.profile.chain())
    fail_config("-o {}: '{}' is a branching graph, and what bonfire trains is a chain of Units; allowed: --json",
                arguments.output, answer.profile.model);
  try {
    write_file(arguments.output, layout_of(arguments, answer), Survives::process);
  } catch (const WriteError& error) {
    fail_config("-o {}", error.what());
  }
}

}  // namespace

void add_partition(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<PartitionArguments>();
  CLI::App* command =
      program.add_subcommand("partition", "Cut a profiled model into replicated stages, as PipeDream's optimizer does");
  command->add_option("PROFILE", arguments->profile, "A profile, or a file with several of PipeDream's profiles")
      ->required()
      ->type_name("");
  command
      ->add_option("--cluster", arguments->cluster,
                   "Count and bandwidth (bytes/s) of each level, the lowest first, such as 8@25e9,4@1.25e9; or a TOML file")
      ->required()
      ->type_name("LEVELS|FILE");
  command->add_option("--model", arguments->model, "Name of the model, if the file contains several")->type_name("NAME");
  command
      ->add_option("--schedule", arguments->schedule,
                   fmt::format("{} (default: pipedream)", fmt::join(schedule::pipedream_names(), ", ")))
      ->type_name("NAME");
  command
      ->add_option("--microbatches", arguments->microbatches,
                   "Microbatches of a minibatch (default: as in the profile); pipedream-2bw and pipedream-flush need them")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("M");
  command->add_option("--memory", arguments->memory, "Memory limit of a rank, such as 16GiB (default: none)")
      ->type_name("BYTES");
  command->add_option("--for", arguments->config, "A configuration: refuse a profile of another model, batch or device")
      ->type_name("FILE.toml");
  command->add_option("-o", arguments->output, "Write the layout to this file, as keys of a configuration")
      ->type_name("FILE.toml");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->callback([arguments, &exit_code] {
    const Answer found = answer(*arguments);
    if (!arguments->output.empty()) write_layout(*arguments, found);
    arguments->json ? print_json(*arguments, found) : print_people(*arguments, found);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
