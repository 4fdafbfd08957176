#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/environment.h"
#include "bonfire/comm/failure.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// Whose output reaches the terminal. Every rank's goes to its file.
enum class Echo { all, first, none };  // all: each line prefixed with its rank; first: rank 0's, as it is

// Ranks whose loss the run can bear, once they have said so (may_be_lost in join.h); that of any other, and before, is a
// failure. So is an end that no other start would change: a configuration that is refused, or a RunOver.
struct LostRanks {
  enum class Policy {
    drop,  // the others go on without it
    wait,  // the others wait: it is started again, alone (returns_of in join.h), with what it says in a file of its own
  };
  int from = 1;  // these and all that follow
  Policy policy = Policy::drop;
  int most_returns = 10;  // of one rank; after that its end is a failure
};
BONFIRE_API const char* name_of(LostRanks::Policy policy);

struct LauncherOptions {
  std::vector<std::string> program = {};  // and its arguments
  int ranks = 1;                          // on this node
  int nodes = 1;
  int node = 0;
  // Where the ranks meet; node 0's launcher listens there. Port 0: a free one (one node only).
  Endpoint master = {"127.0.0.1", 0};
  std::string address = {};  // of this node, to which its ranks' connections are bound; empty: chosen
  std::string token = {};    // empty: a fresh one (one node), or job_token() (several)
  int max_restarts = 0;
  std::optional<LostRanks> lost = {};  // nothing: every rank that fails ends the run
  // rank-N.log, and rank-N.restart-K.log of a later attempt. Empty: a temporary folder, removed when all went well.
  std::filesystem::path log_folder = {};
  Echo echo = Echo::all;
  // How long ranks that must end (another one failed) have between SIGTERM and SIGKILL.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  // How long ranks have that were asked to end by a signal to the launcher, which may save first. Not set: what the variable
  // BONFIRE_STOP_TIMEOUT says (seconds), or 60 s.
  std::optional<std::chrono::milliseconds> stop_grace = {};
  // How long the last words wait for somebody who does not read them (a pager, a halted terminal). Not set:
  // BONFIRE_READER_TIMEOUT, or 30 s.
  std::optional<std::chrono::milliseconds> reader_patience = {};
  Variables variables = {};  // for the ranks, beyond this process's own
  // The program begins by taking requests to stop (StopSignals): its ranks are started with those signals blocked, so that
  // none kills a rank before it does.
  bool ranks_take_signals = false;
  // Called when requests to stop are the launcher's to hear, and before anything is made or started: for callers who have to
  // make something, such as the log folder, that nobody would know of where a signal ended the process.
  std::function<void(LauncherOptions&)> prepare = {};
  Log log{};
};

struct LaunchOutcome {
  int exit_code = 0;  // 0 done, 1 failed, 2 a rank refused its configuration, 3 stopped on request after saving
  std::optional<RankFailure> failure;  // the first one of the last attempt
  std::vector<int> dropped = {};       // ranks of this node that the last attempt went on without
  int restarts = 0;
  // Why not all of the ranks' stdout has gone to this process's, as errno says it; 0: all has, or none was to.
  int stdout_error = 0;
  std::filesystem::path log_folder;
};

// Throws the ConfigError that launch_ranks would throw for options that cannot be right, or for more ranks than this
// process may have files for: for callers who make something first.
BONFIRE_API void check_launch(const LauncherOptions& options);

// Starts the ranks of this node and stays until all have ended. The first failure is reported, the others are ended, and
// all are started again up to `max_restarts` times; a rank that may be lost is reported and does not end the others. No rank
// outlives the launcher, even where that is killed. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to the ranks of all
// nodes meanwhile, and with SIGTSTP (Ctrl-Z) the ranks stop, too; what this process ignores stays ignored. Nobody waits for
// whoever reads this process's stdout and stderr. Throws ConfigError before anything starts. REQUIRES: called from a thread
// that lives until it returns (the kernel ends the ranks when their parent thread ends); one at a time in a process.
BONFIRE_API LaunchOutcome launch_ranks(LauncherOptions options);

// The secret of a job whose processes are started apart from each other: BONFIRE_TOKEN, or else made from the user's own
// key file (~/.config/bonfire/key, made on first use, readable by nobody else) and the job's name, so that it is the same
// wherever the home folder is.
BONFIRE_API std::string job_token(const Variables& variables, const std::string& job);

}  // namespace bonfire
