#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/train/loop.h"
#include "cli/commands.h"
#include "cli/start.h"

namespace bonfire::cli {

void add_train(CLI::App& program, int& exit_code) {
  struct Arguments {
    std::string file;
    std::optional<int> ranks;
    int max_restarts = 0;
    std::vector<std::string> overrides;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("train", "Train what a configuration file describes");
  command->add_option("file", arguments->file, "The configuration; docs/configuration.md lists its keys")
      ->required()
      ->type_name("FILE.toml");
  command
      ->add_option(
          "--ranks", arguments->ranks,
          "Start this many local ranks (default: the launch environment's, else the product of the axes in [layout])")
      ->check(CLI::PositiveNumber);
  command->add_option("--max-restarts", arguments->max_restarts, "Start all ranks again after a failure, at most so often")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--set", arguments->overrides, "Override a key of the file")
      ->type_name("SECTION.KEY=VALUE")
      ->allow_extra_args(false);
  command->add_flag("--json", arguments->json, "Print one object on stdout at the end; words go to stderr");

  command->callback([arguments, &exit_code] {
    Config config = load_config(arguments->file, arguments->overrides);
    StartOptions options{
        .rank_arguments = {"train", arguments->file}, .ranks = arguments->ranks, .max_restarts = arguments->max_restarts};
    for (const auto& text : arguments->overrides)
      options.rank_arguments.insert(options.rank_arguments.end(), {"--set", text});
    if (arguments->json) options.rank_arguments.push_back("--json");

    exit_code = start(config, options, [&](const World& world, const std::filesystem::path& folder) {
      const TrainReport report = train(world, config, {.folder = folder, .progress = progress_to_stderr()});
      if (world.rank() != 0) return;
      fmt::print(stderr, "\n{}", summary(report));
      if (arguments->json) fmt::print("{}\n", to_json(report));
    });
  });
}

}  // namespace bonfire::cli
