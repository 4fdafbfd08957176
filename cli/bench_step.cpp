#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/train/capturable.h"
#include "bonfire/train/loop.h"
#include "cli/commands.h"
#include "cli/config_arguments.h"
#include "cli/limits.h"
#include "cli/start.h"

namespace bonfire::cli {

void add_bench_step(CLI::App& bench, int& exit_code) {
  struct Arguments {
    ConfigArguments config;
    std::optional<int> ranks;
    int steps = 20;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = bench.add_subcommand("step", "Measure time and memory of a configuration's training steps");
  arguments->config.add_to(*command);
  command
      ->add_option("--ranks", arguments->ranks,
                   "Number of local ranks to start (default: from the launcher, else BONFIRE_RANKS, else the product of the "
                   "axes in [layout], else one per GPU)")
      ->check(at_least(1));
  command->add_option("--steps", arguments->steps, "Steps to time, after the warm-up")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print one JSON object to stdout, everything else to stderr");

  command->callback([arguments, &exit_code] {
    auto overrides = arguments->config.overrides;
    overrides.push_back(fmt::format("train.steps={}", arguments->steps));
    overrides.push_back("train.eval_every=0");
    overrides.push_back("train.trace_steps=0");
    overrides.push_back("checkpoint.every=0");
    Config config = load_config(arguments->config.file, overrides);
    if (config.train.nan_policy == "rollback") config.train.nan_policy = "stop";  // nothing is saved to go back to

    StartOptions options{.rank_arguments = {"bench", "step", "--steps", std::to_string(arguments->steps)},
                         .ranks = arguments->ranks,
                         .keep_folder = false};
    for (auto& word : arguments->config.words()) options.rank_arguments.push_back(std::move(word));
    if (arguments->json) options.rank_arguments.push_back("--json");

    exit_code = start(config, options, [&](const World& world, const RankStart& rank) {
      // The report leaves them out.
      config.train.steps += steps_to_settle(config, world.device());
      TrainReport report = train(world, config, {.folder = rank.folder, .stop = &rank.stop, .is_measurement = true});
      report.run_folder.clear();  // it goes when the ranks have ended
      const int code = report.stopped ? kStoppedAfterSaving : kDone;
      if (world.rank() != 0) return code;
      std::string words = summary(report);
      if (report.stopped) words += fmt::format("  stopped on request after step {}\n", report.steps);
      std::fputs(words.c_str(), stderr);  // whether or not somebody reads it
      if (arguments->json) fmt::print("{}\n", to_json(report));
      return code;
    });
  });
}

}  // namespace bonfire::cli
