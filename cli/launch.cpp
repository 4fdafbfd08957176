#include <memory>
#include <string>
#include <vector>

#include <CLI/App.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/launcher.h"
#include "cli/commands.h"
#include "cli/limits.h"

namespace bonfire::cli {

void add_launch(CLI::App& program, int& exit_code) {
  struct Arguments {
    LauncherOptions options;
    std::string master, logs;
    int port = 0;
  };
  auto arguments = std::make_shared<Arguments>();
  LauncherOptions& options = arguments->options;
  CLI::App* command = program.add_subcommand("launch", "Start any Bonfire program on local ranks");
  command->add_option("-n,--ranks", options.ranks, "Ranks on this node")->check(at_least(1));
  command->add_option("--max-restarts", options.max_restarts, "Start all ranks again after a failure, at most so often")
      ->check(at_least(0));
  command->add_option("--nodes", options.nodes, "Nodes, each with a launcher of its own")->check(at_least(1));
  command->add_option("--node-rank", options.node, "Number of this node, from 0")->check(at_least(0));
  command->add_option("--master", arguments->master, "HOST:PORT where node 0's launcher listens")->type_name("HOST:PORT");
  command->add_option("--address", options.address, "Address of this node that other nodes reach it at (default: chosen)")
      ->type_name("HOST");
  command->add_option("--port", arguments->port, "Loopback port where the ranks meet (default: a free one)")
      ->check(CLI::Range(1, 65535))
      ->excludes("--master");
  command->add_option("--logs", arguments->logs, "Folder for the ranks' output (default: temporary)")->type_name("DIR");
  command->add_option("program", options.program, "The program and its arguments, after --")
      ->required()
      ->type_name("-- PROGRAM ARGS...");
  command->positionals_at_end();
  command->footer("Several nodes share one secret: BONFIRE_TOKEN, or the key in ~/.config/bonfire of a shared home folder.");

  command->callback([arguments, &exit_code] {
    LauncherOptions& options = arguments->options;
    if (!arguments->master.empty()) options.master = parse_endpoint(arguments->master);
    if (arguments->port != 0) options.master.port = arguments->port;
    if (options.nodes == 1 && options.node != 0) fail_config("--node-rank {} needs --nodes", options.node);
    options.log_folder = arguments->logs;
    const LaunchOutcome outcome = launch_ranks(std::move(options));
    exit_code = outcome.exit_code;
  });
}

}  // namespace bonfire::cli
