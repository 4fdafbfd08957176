#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/comm/stop_signals.h"
#include "bonfire/comm/stop_vote.h"
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
    int nodes = 1, node = 0;
    std::string master, address;
    int max_restarts = 0;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("train", "Train what a configuration file describes");
  arguments->config.add_to(*command);
  command
      ->add_option("--ranks", arguments->ranks,
                   "Start this many ranks on this node (default: the launch environment's, else BONFIRE_RANKS, else the "
                   "product of the axes in [layout], else one for each GPU)")
      ->check(at_least(1));
  command->add_option("--nodes", arguments->nodes, "Nodes, each with this command of its own")->check(at_least(1));
  command->add_option("--node-rank", arguments->node, "Number of this node, from 0")->check(at_least(0));
  command->add_option("--master", arguments->master, "HOST:PORT where node 0's command listens")->type_name("HOST:PORT");
  command->add_option("--address", arguments->address, "Address of this node that other nodes reach it at (default: chosen)")
      ->type_name("HOST");
  command->add_option("--max-restarts", arguments->max_restarts, "Start all ranks again after a failure, at most so often")
      ->check(at_least(0));
  command->add_flag("--json", arguments->json, "Print one object on stdout at the end; words go to stderr");

  command->callback([arguments, &exit_code] {
    Config config = load_config(arguments->config.file, arguments->config.overrides);
    StartOptions options{.rank_arguments = {"train"},
                         .ranks = arguments->ranks,
                         .nodes = arguments->nodes,
                         .node = arguments->node,
                         .master = arguments->master,
                         .address = arguments->address,
                         .max_restarts = arguments->max_restarts};
    for (auto& word : arguments->config.words()) options.rank_arguments.push_back(std::move(word));
    if (arguments->json) options.rank_arguments.push_back("--json");

    exit_code = start(config, options, [&](const World& world, const std::filesystem::path& folder) {
      if (world.rank() == 0) world.log().info("weights: {}", weights_kept);
      StopVote vote(world.store(), {.rank = world.rank(), .size = world.size(), .log = world.log()});
      const StopSignals signals([&vote] { vote.ask(); });
      const TrainReport report = train(world, config, {.folder = folder, .progress = progress_to_stderr(), .stop = &vote});
      const int code = report.stopped ? kStoppedAfterSaving : kDone;
      if (world.rank() != 0) return code;
      fmt::print(stderr, "\n{}", summary(report));
      if (report.stopped)
        fmt::print(stderr,
                   "  stopped on request after step {} of {}; nothing was saved: checkpoints are not available yet\n",
                   report.steps, config.train.steps);
      if (arguments->json) fmt::print("{}\n", to_json(report));
      return code;
    });
  });
}

}  // namespace bonfire::cli
