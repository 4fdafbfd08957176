#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/comm/world.h"
#include "bonfire/train/config.h"
#include "bonfire/train/progress.h"

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
  bool keep_folder = true;  // a benchmark leaves nothing behind
};

// What a rank does, in the run's folder; returns its exit code.
using RankBody = std::function<int(const World& world, const std::filesystem::path& folder)>;

// Resolves `config` for the ranks that there are, checks all that can be checked before anything starts, then runs `body` as
// every rank: in this process where it is a rank already, else in as many copies of this program.
//
// How many ranks: --ranks; else what the launch environment says; else BONFIRE_RANKS; else the product of the axes that
// [layout] names; else one for each GPU of this machine, or one.
// Returns the exit code. Throws ConfigError before anything starts.
int start(Config& config, const StartOptions& options, const RankBody& body);

// The progress line of a rank: a bar where the words of the rank end on a terminal, be it through the launcher's pipe.
ProgressLine::Options progress_to_stderr();

}  // namespace bonfire::cli
