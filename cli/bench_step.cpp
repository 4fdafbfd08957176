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
  CLI::App* command = bench.add_subcommand("step", "Time and memory of the training steps of a configuration");
  arguments->config.add_to(*command);
  command->add_option("--ranks", arguments->ranks, "Start this many local ranks")->check(at_least(1));
  command->add_option("--steps", arguments->steps, "Steps to time, after those that set the run up")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print one object on stdout; words go to stderr");

  command->callback([arguments, &exit_code] {
    auto overrides = arguments->config.overrides;
    overrides.push_back(fmt::format("train.steps={}", arguments->steps));
    overrides.push_back("train.eval_every=0");
    overrides.push_back("train.trace_steps=0");
    Config config = load_config(arguments->config.file, overrides);

    StartOptions options{.rank_arguments = {"bench", "step", "--steps", std::to_string(arguments->steps)},
                         .ranks = arguments->ranks,
                         .keep_folder = false};
    for (auto& word : arguments->config.words()) options.rank_arguments.push_back(std::move(word));
    if (arguments->json) options.rank_arguments.push_back("--json");

    exit_code = start(config, options, [&](const World& world, const std::filesystem::path& folder) {
      // The report leaves them out.
      config.train.steps += steps_to_settle(config, world.device());
      TrainReport report = train(world, config, {.folder = folder});
      report.run_folder.clear();  // it goes when the ranks have ended
      if (world.rank() != 0) return;
      fmt::print(stderr, "{}", summary(report));
      if (arguments->json) fmt::print("{}\n", to_json(report));
    });
  });
}

}  // namespace bonfire::cli
