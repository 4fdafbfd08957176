#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/comm/environment.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/watchdog.h"
#include "bonfire/comm/world.h"

namespace bonfire {

class StopSignals;

// How a process becomes a rank. None of the functions below owns main, the signals or the logger.
struct JoinOptions {
  // Device, timeout, debug, log. The place (local rank, node, address) is filled in.
  WorldOptions world = {};
  // Chooses the device, once the place is known; local_device takes the GPUs in turn. Without it: world.device,
  // except that bonfire::launch takes local_device in place of the CPU.
  std::function<c10::Device(const Environment&)> device = {};
  std::string configuration = {};                                          // compared between the ranks: best a hash
  std::chrono::milliseconds rendezvous_timeout = std::chrono::minutes(5);  // BONFIRE_RENDEZVOUS_TIMEOUT (seconds) wins
  // What happens when the watchdog finds that the run stands still. Without it: a line in the log.
  std::function<void(const std::string&)> on_stall = {};
  // Who hears requests to stop. One that comes before all ranks are there ends them all (run_rank then returns 3); a later
  // one is kept for the program.
  StopSignals* stop = nullptr;
  // Called by run_rank before it ends the process because the run has failed, on any thread.
  std::function<void()> on_failure = {};
  Variables variables = process_variables();
};

// The device of the rank at `place`: the GPUs that it sees are given out in turn, by local rank; the CPU where there is
// none. Makes it the calling thread's current one. Warns where there is a GPU that cannot be used.
BONFIRE_API c10::Device local_device(const Environment& place, const Log& log = {});

// Collective: the World that the environment tells of (torchrun, Slurm, MPI, our launcher); alone where it tells of none.
// Throws ConfigError where it is contradictory.
BONFIRE_API World world_from_environment(JoinOptions options = {});

// Collective: checks in (see rendezvous.h), makes the World, and watches it. `place` needs rank, size, local rank and size,
// and node. A key of the store may exist from an earlier attempt only where `place.restarts` differs.
BONFIRE_API World world_from_store(c10::intrusive_ptr<c10d::Store> store, const Environment& place,
                                   JoinOptions options = {});

// Where the launcher of this rank can bear its loss (LauncherOptions::lost): from now on the other ranks can, too. Until
// then, and where it is not called, a rank that fails ends the run. Nothing where no launcher offers that. Throws Error
// where the launcher cannot be told.
BONFIRE_API void may_be_lost(const Variables& variables);
// How often this rank was lost and started again alone. Its World is then one without connections: see returned_world.h.
BONFIRE_API int returns_of(const Variables& variables);

// A meeting place for ranks that have another way to tell each other a line of text, such as MPI: one of them hosts it and
// passes `invitation()` on; each, the host too, joins with it.
class BONFIRE_API MeetingPlace {
 public:
  // `address`: where to listen; loopback is right where all ranks are on one machine.
  explicit MeetingPlace(const std::string& address, Log log = {});
  // "HOST:PORT TOKEN".
  std::string invitation() const;

 private:
  std::string token_;
  std::shared_ptr<StoreServer> server_;
  friend BONFIRE_API World world_from_invitation(const std::string&, const Environment&, JoinOptions, MeetingPlace*);
};

// Collective. `host`: on the rank that hosts; its place then lives as long as the World.
BONFIRE_API World world_from_invitation(const std::string& invitation, const Environment& place, JoinOptions options = {},
                                        MeetingPlace* host = nullptr);

// Runs one rank from beginning to end: joins, calls `program`, and turns what goes wrong into words on stderr, a note for
// the launcher, and an exit code (1, or 2 for a ConfigError; 3 where JoinOptions::stop was asked before all had joined).
// Where the run has failed, it ends the process: other ranks may be gone, and connections to them would be waited for.
BONFIRE_API int run_rank(JoinOptions options, const std::function<int(World&)>& program);

}  // namespace bonfire
