#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/train/loop.h"
#include "cli/commands.h"
#include "cli/config_arguments.h"
#include "cli/limits.h"
#include "cli/start.h"

namespace bonfire::cli {

void add_train(CLI::App& program, int& exit_code) {
  struct Arguments {
    ConfigArguments config;
    std::optional<int> ranks;
    int max_restarts = 0;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("train", "Train what a configuration file describes");
  arguments->config.add_to(*command);
  command
      ->add_option(
          "--ranks", arguments->ranks,
          "Start this many local ranks (default: the launch environment's, else the product of the axes in [layout])")
      ->check(at_least(1));
  command->add_option("--max-restarts", arguments->max_restarts, "Start all ranks again after a failure, at most so often")
      ->check(at_least(0));
  command->add_flag("--json", arguments->json, "Print one object on stdout at the end; words go to stderr");

  command->callback([arguments, &exit_code] {
    Config config = load_config(arguments->config.file, arguments->config.overrides);
    StartOptions options{.rank_arguments = {"train"}, .ranks = arguments->ranks, .max_restarts = arguments->max_restarts};
    for (auto& word : arguments->config.words()) options.rank_arguments.push_back(std::move(word));
    if (arguments->json) options.rank_arguments.push_back("--json");

    exit_code = start(config, options, [&](const World& world, const std::filesystem::path& folder) {
      if (world.rank() == 0) world.log().info("weights: {}", weights_kept);
      const TrainReport report = train(world, config, {.folder = folder, .progress = progress_to_stderr()});
      if (world.rank() != 0) return;
      fmt::print(stderr, "\n{}", summary(report));
      if (arguments->json) fmt::print("{}\n", to_json(report));
    });
  });
}

}  // namespace bonfire::cli
