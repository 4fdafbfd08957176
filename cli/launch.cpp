#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/App.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/launcher.h"
#include "cli/commands.h"
#include "cli/limits.h"
#include "cli/requests.h"

namespace bonfire::cli {

void add_launch(CLI::App& program, int& exit_code) {
  struct Arguments {
    LauncherOptions options;
    std::string master, logs;
    std::optional<int> ranks;
    int port = 0;
  };
  auto arguments = std::make_shared<Arguments>();
  LauncherOptions& options = arguments->options;
  CLI::App* command = program.add_subcommand("launch", "Start a Bonfire program as several ranks");
  command
      ->add_option("-n,--ranks", arguments->ranks, "Number of ranks on this node (default: BONFIRE_RANKS, else one per GPU)")
      ->check(at_least(1));
  command->add_option("--max-restarts", options.max_restarts, "Restart all ranks after a failure, at most this many times")
      ->check(at_least(0));
  command->add_option("--nodes", options.nodes, "Number of nodes; run this command on each")->check(at_least(1));
  command->add_option("--node-rank", options.node, "Index of this node, starting from 0")->check(at_least(0));
  command->add_option("--master", arguments->master, "Address at which node 0's launcher listens")->type_name("HOST:PORT");
  command->add_option("--address", options.address, "Address at which other nodes reach this one (default: chosen)")
      ->type_name("HOST");
  command->add_option("--port", arguments->port, "Loopback port on which the ranks meet (default: a free one)")
      ->check(CLI::Range(1, 65535))
      ->excludes("--master");
  command->add_option("--logs", arguments->logs, "Folder for the ranks' output (default: a temporary one)")
      ->type_name("DIR");
  command->add_option("program", options.program, "Program and arguments, after --")
      ->required()
      ->type_name("-- PROGRAM ARGS...");
  command->positionals_at_end();
  command->footer(
      "Several nodes need a common secret: BONFIRE_TOKEN, or the key in ~/.config/bonfire of a shared home directory.");

  command->callback([arguments, &exit_code] {
    end_on_request();
    LauncherOptions& options = arguments->options;
    if (!arguments->ranks) arguments->ranks = asked_ranks(process_variables());
    options.ranks = arguments->ranks ? *arguments->ranks : std::max(1, gpu_count());
    if (!arguments->master.empty()) options.master = parse_endpoint(arguments->master);
    if (arguments->port != 0) options.master.port = arguments->port;
    if (options.nodes == 1 && options.node != 0) fail_config("--node-rank {} needs --nodes", options.node);
    options.log_folder = arguments->logs;
    options.prepare = [](LauncherOptions&) { launcher_hears_requests(); };
    exit_code = launch_ranks(std::move(options)).exit_code;
  });
}

}  // namespace bonfire::cli
