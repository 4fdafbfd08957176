#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/comm/stop_vote.h"
#include "bonfire/comm/world.h"
#include "bonfire/train/config.h"
#include "bonfire/train/progress.h"
#include "bonfire/train/resume.h"

namespace bonfire::cli {

// A run that a subcommand was asked for.
struct StartOptions {
  std::vector<std::string> rank_arguments;  // the command's own, for each rank that it starts; without --ranks
  std::optional<int> ranks{};               // --ranks
  // Of several nodes, each with a command of its own; on one node the rest means nothing.
  int nodes = 1;
  int node = 0;
  std::string master{};   // HOST:PORT, where node 0's command listens
  std::string address{};  // of this node, that others reach it at; empty: chosen
  int max_restarts = 0;
  bool keep_folder = true;             // a benchmark leaves nothing behind
  std::filesystem::path run_folder{};  // of an earlier run that goes on in it; empty: one is made
  // What else is checked before anything starts, once the configuration is resolved.
  std::function<void(const Config&, LookAt look)> check{};
};

// What a rank is given.
struct RankStart {
  std::filesystem::path folder;  // the run's
  StopVote& stop;
  int restarts = 0;  // how often the ranks were started before
};

// What a rank does, until it has done it or `stop` says so; returns its exit code.
using RankBody = std::function<int(const World& world, const RankStart& start)>;

// Resolves `config` for the ranks that there are, checks all that can be checked before anything starts, then runs `body` as
// every rank: in this process where it is a rank already, else in as many copies of this program.
//
// How many ranks: --ranks; else what the launch environment says; else BONFIRE_RANKS; else the product of the axes that
// [layout] names; else one for each GPU of this machine, or one.
// A request to stop (SIGINT, SIGTERM, SIGHUP, SIGUSR1) ends it with exit code 3 whenever it comes.
// Returns the exit code. Throws ConfigError before anything starts.
int start(Config& config, const StartOptions& options, const RankBody& body);

// The progress line of a rank: a bar where the words of the rank end on a terminal, be it through the launcher's pipe.
ProgressLine::Options progress_to_stderr();

}  // namespace bonfire::cli
