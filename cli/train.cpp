#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/comm/join.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/resume.h"
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
    std::string resume;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("train", "Train the model that a configuration file describes");
  arguments->config.add_to(*command);
  command
      ->add_option(
          "--ranks", arguments->ranks,
          "Number of ranks to start on this node (default: from the launcher, else BONFIRE_RANKS, else the product of "
          "the axes in [layout], else one per GPU)")
      ->check(at_least(1));
  command->add_option("--nodes", arguments->nodes, "Number of nodes; run this command on each")->check(at_least(1));
  command->add_option("--node-rank", arguments->node, "Index of this node, starting from 0")->check(at_least(0));
  command->add_option("--master", arguments->master, "Address at which node 0's command listens")->type_name("HOST:PORT");
  command->add_option("--address", arguments->address, "Address at which other nodes reach this one (default: chosen)")
      ->type_name("HOST");
  command
      ->add_option("--max-restarts", arguments->max_restarts,
                   "Restart all ranks after a failure, at most this many times; they go on from the newest checkpoint")
      ->check(at_least(0));
  command
      ->add_option("--resume", arguments->resume,
                   "Go on from the newest checkpoint of an earlier run: `latest` of this name, or the folder of a run; the "
                   "folder of a checkpoint begins a new run with it")
      ->type_name("latest|DIR");
  command->add_flag("--json", arguments->json, "Print one JSON object to stdout at the end, everything else to stderr");

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

    std::optional<Resume> resume;
    if (!arguments->resume.empty()) {
      resume = find_resume(config, arguments->resume);
      options.run_folder = resume->run_folder;
      options.check = [&](const Config& resolved, LookAt look) { require_resumable(resolved, *resume, look); };
      options.rank_arguments.insert(options.rank_arguments.end(), {"--resume", arguments->resume});
    }

    exit_code = start(config, options, [&](const World& world, const RankStart& rank) {
      TrainOptions train_options{.folder = rank.folder, .progress = progress_to_stderr(), .stop = &rank.stop};
      train_options.may_be_lost = [] { may_be_lost(process_variables()); };
      train_options.resume = rank.restarts > 0 || (resume && !resume->run_folder.empty());
      if (resume && resume->run_folder.empty()) train_options.begin_with = resume->checkpoint;
      const TrainReport report = train(world, config, train_options);
      const int code = report.stopped ? kStoppedAfterSaving : kDone;
      if (world.rank() != 0) return code;
      std::string words = fmt::format("\n{}", summary(report));
      if (report.stopped)
        words += fmt::format("  stopped on request after step {} of {}; {}\n", report.steps, config.train.steps,
                             report.checkpoint.empty() ? "nothing was saved: checkpoint.every = 0"
                                                       : "continue with --resume " + report.run_folder);
      std::fputs(words.c_str(), stderr);  // whether or not somebody reads it
      if (arguments->json) fmt::print("{}\n", to_json(report));
      return code;
    });
  });
}

}  // namespace bonfire::cli
