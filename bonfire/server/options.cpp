#include "bonfire/server/options.h"

#include "bonfire/base/error.h"

namespace bonfire {

const char* name_of(ServerMode mode) {
  switch (mode) {
    case ServerMode::synchronous: return "synchronous";
    case ServerMode::bounded: return "bounded";
    case ServerMode::asynchronous: return "asynchronous";
  }
  return "?";
}

const char* name_of(WhenLost lost) {
  switch (lost) {
    case WhenLost::stop: return "stop";
    case WhenLost::drop: return "drop";
    case WhenLost::wait: return "wait";
  }
  return "?";
}

void require_servers(const ServerOptions& options, int ranks) {
  if (options.servers < 1 || options.servers >= ranks)
    fail_config("{} servers of {} ranks: the others are the workers; allowed: 1 to {}", options.servers, ranks, ranks - 1);
  const int workers = ranks - options.servers;
  const bool together = options.mode == ServerMode::synchronous;
  if (options.staleness < 0) fail_config("staleness is {}; allowed: 0 or more steps", options.staleness);
  if (options.staleness > 0 && options.mode != ServerMode::bounded)
    fail_config("staleness is {} in {} mode; allowed with it: 0, or mode bounded", options.staleness, name_of(options.mode));
  if (options.backup < 0 || options.backup >= workers)
    fail_config("{} backup workers of {}: an update takes the gradients of the others; allowed: 0 to {}", options.backup,
                workers, workers - 1);
  if (options.backup > 0 && !together)
    fail_config("{} backup workers in {} mode, where no update waits for several; allowed: 0, or mode synchronous",
                options.backup, name_of(options.mode));
  if (options.compression == plan::Compression::powersgd)
    fail_config(
        "compression powersgd with a parameter server: its second factors depend on the average of the first, which the "
        "workers would have to fetch in the middle of a step; allowed: none, bf16 and fp16");
  if (options.pulled == Pulled::gradients && (!together || options.backup > 0 || options.lost != WhenLost::stop))
    fail_config(
        "workers that pull gradients keep weights of their own, which stay equal only if all take part in every step; "
        "allowed with it: mode synchronous, no backup workers, and lost = stop");
  if (options.clip < 0 || options.clip_value < 0)
    fail_config("clip is {} and clip_value {}; allowed: 0 (never) or more", options.clip, options.clip_value);
}

bool is_server(const World& world, const ServerOptions& options) { return world.rank() < options.servers; }

}  // namespace bonfire
