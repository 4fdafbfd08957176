#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/server/ledger.h"
#include "bonfire/server/options.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

// One update of a server's, in words of numbers.
struct ServerUpdate {
  std::int64_t update = 0;   // from 1
  std::vector<Push> pushes;  // that it took, in the order of the workers
  bool applied = true;       // false: not finite, nothing has changed
  double number = 0;         // the mean of what the workers sent beside their gradients
  double gradient_norm = 0;  // where somebody asked
  double staleness = 0;      // how many updates the weights were behind that made the gradients, in the mean
};

// What a server has seen.
struct ServerReport {
  std::int64_t updates = 0;
  std::int64_t skipped = 0;   // updates that were not finite
  std::vector<Push> dropped;  // gradients that were late
  // The first step of a worker that is gone whose samples are in no update. `versions`: the last update before it.
  std::vector<Push> lost;
  std::int64_t most_stale = 0;  // the largest staleness of an update
  double mean_stale = 0;
  std::int64_t most_lead = 0;              // of a worker that began a step, before the slowest
  std::vector<ServerUpdate> updates_kept;  // ServerOptions::keep_records
};

// Keeps its share of a model's weights, and the optimizer that updates them with the gradients that workers send. It has no
// model: workers say what they train.
class BONFIRE_API Server : public Sliced {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(Shares& shares)>;

  // Waits for all workers, whose weights are worker 0's. Collective among all ranks. `make`: an optimizer of the shares;
  // not asked where gradients are pulled. Like a Worker it gives SIGPIPE an action that does nothing, unless the program has
  // one of its own: a connection whose other end is gone must not end this process.
  Server(const World& world, const ServerOptions& options, const MakeOptimizer& make);
  ~Server() override;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Until all workers have left. Throws what ends the run: PeerLost where a worker is lost and `lost` is stop, or it is drop
  // and all of them were.
  ServerReport serve();

  // While the lock lives no update begins, and none is under way; workers are heard and answered. From any thread but the
  // one that updates.
  [[nodiscard]] std::unique_lock<std::mutex> hold();

  // Weights and optimizer state of this server's shares. Before and after serve(), in ServerOptions::after_update, and
  // under hold(). Collective over the servers.
  std::vector<Slice> slices() override;
  void slices_written() override;

  // Updates so far, and the steps that each worker has taken: what goes on in a server that was restarted.
  std::int64_t version() const;
  std::vector<std::int64_t> steps() const;
  // The steps of the slowest worker, of those that were not dropped.
  std::int64_t slowest() const;
  // Before serve().
  void resume(std::int64_t version, const std::vector<std::int64_t>& steps);

  // Bytes of this server's weights, optimizer state and buffers.
  std::int64_t bytes() const;
  // The recorder of the connection to each worker.
  Recorder& recorder(int worker) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bonfire
