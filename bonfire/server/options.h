#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/world.h"
#include "bonfire/plan/layout.h"

namespace bonfire {

class Optimizer;
struct ServerUpdate;

// Who waits for whom.
enum class ServerMode {
  synchronous,   // an update takes the gradients of all workers, averaged; all wait for it
  bounded,       // each worker's gradient is an update; a worker that is too far ahead of the slowest waits
  asynchronous,  // each worker's gradient is an update; nobody waits
};

// What becomes of a run that loses a worker.
enum class WhenLost {
  stop,  // it ends, with an error that names the worker
  drop,  // it goes on without the worker
  wait,  // it goes on as far as the mode lets it, until the worker has come back
};

// What a worker gets for its gradients.
enum class Pulled {
  weights,    // updated by the servers' optimizer; workers have none
  gradients,  // the average of all workers' gradients, for an optimizer of the worker's own
};

// Of the parameter server. The same on all ranks.
struct ServerOptions {
  std::string name = "server";  // of this one; several in a World have different ones
  int servers = 1;              // the first ranks of the World; the others are workers
  ServerMode mode = ServerMode::synchronous;
  int staleness = 0;  // bounded: how many steps a worker may be ahead of the slowest
  int backup = 0;     // synchronous: an update takes the gradients of the first `workers - backup`; the others' are dropped
  WhenLost lost = WhenLost::stop;
  Pulled pulled = Pulled::weights;
  plan::Compression compression = plan::Compression::none;  // of gradients on their way: none, bf16 or fp16
  // Of each update: as StepOptions.
  double clip = 0;
  double clip_value = 0;
  bool skip_non_finite = false;
  // On servers, before each update: the place to set a learning rate. `update` is the number of updates so far.
  std::function<void(Optimizer& optimizer, std::int64_t update)> before_update{};
  // On servers, after each update; the weights do not change meanwhile. What it returns is the newest update that outlives
  // this process: workers hear of it. Collective over the servers where the mode is synchronous.
  std::function<std::int64_t(const ServerUpdate& update)> after_update{};
  bool keep_records = false;  // ServerReport::updates
  // Every rank has a network card of this kind: what it sends queues on it, and so does what it receives. For experiments on
  // one machine.
  std::optional<Link> link{};
  // Of the connections between workers and servers, which are on the host also where the World is not.
  WorldOptions connection{};
  Log log{};
};

// What a worker's step has come to.
struct ServedStep {
  std::int64_t version = 0;  // updates that the weights have seen which the next step begins with (of the first server)
  bool used = true;          // false: the gradients were late, or not finite, and were dropped
  double gradient_norm = 0;  // of the update; 0 where nobody asked
  double number = 0;         // the mean of the numbers of those workers whose gradients the update took
  std::int64_t durable = 0;  // the last update that outlives the servers
};

// Throws ConfigError for options that cannot be, in a World of so many ranks.
BONFIRE_API void require_servers(const ServerOptions& options, int ranks);
// Whether this rank is a server; otherwise it is a worker.
BONFIRE_API bool is_server(const World& world, const ServerOptions& options);

BONFIRE_API const char* name_of(ServerMode mode);
BONFIRE_API const char* name_of(WhenLost lost);

}  // namespace bonfire
