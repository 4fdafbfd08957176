#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/server/options.h"

namespace bonfire {

// A worker's gradients of one step, all of which have reached the server.
struct Push {
  int worker = 0;
  std::int64_t step = 0;               // of the worker, from 1
  std::vector<std::int64_t> versions;  // of the weights that made them, by Unit: how many updates there had been
  // Of weights of different versions on different servers: in synchronous mode all of them find it late.
  bool mixed = false;
  bool finite = true;  // false: nothing is to be done with them
  double number = 0;   // what the worker wanted averaged beside them: its loss
};

// One server's books: which gradients it has, which of them the next update takes, and which workers may go on. It knows
// neither tensors nor threads.
class BONFIRE_API Ledger {
 public:
  struct Rules {
    ServerMode mode = ServerMode::synchronous;
    int workers = 1;
    int staleness = 0;
    int backup = 0;
  };
  explicit Ledger(const Rules& rules, std::int64_t version = 0);

  // What has become of a worker's last gradients.
  struct Outcome {
    std::int64_t version = 0;  // the update that took them, or, where none did, the last before they were dropped
    bool used = false;
  };

  // REQUIRES: the worker has none under way. In synchronous mode gradients of older weights are late: they are dropped. So
  // are those of a step that an update has taken already: a worker that was lost and is back takes its step again where not
  // all servers have it. They count as used.
  void add(Push push);
  // The workers whose gradients the next update takes, in their order; nothing: it has to wait.
  std::optional<std::vector<int>> next() const;
  // Whether gradients of the worker wait for an update.
  bool has(int worker) const;
  // The same; they will wait even if the worker is lost, until commit() or release().
  bool claim(int worker);
  // There will be no update of what was claimed.
  void release();
  // Takes them for an update, in the order of the workers. Others that are late now are dropped. REQUIRES: all are there.
  std::vector<Push> commit(const std::vector<int>& workers);

  // The worker's last gradients, once it is known what has become of them.
  std::optional<Outcome> outcome(int worker) const;
  // Whether the worker may begin its next step.
  bool may_go_on(int worker) const;

  // It has done all its steps.
  void leave(int worker);
  // It is gone, and its gradients that wait with it. `returns`: it is still waited for.
  void lose(int worker, bool returns);
  // It is back.
  void come_back(int worker);

  std::int64_t version() const { return version_; }  // updates so far
  // The step that the worker has ended last: it was used or dropped.
  std::int64_t steps(int worker) const { return at(worker).steps; }
  // The last step of the worker that is in an update.
  std::int64_t last_used(int worker) const { return at(worker).last_used; }
  // The last update that has gradients of the worker.
  std::int64_t last_update(int worker) const { return at(worker).last_update; }
  // A server that was restarted has had a life before.
  void set_steps(int worker, std::int64_t steps) { at(worker).steps = at(worker).last_used = steps; }
  // How many steps the worker is ahead of the slowest one.
  std::int64_t lead(int worker) const;
  bool active(int worker) const { return at(worker).state != State::gone; }
  // Whether the worker is connected.
  bool present(int worker) const { return at(worker).state == State::present; }
  int actives() const;
  // Gradients that were late.
  const std::vector<Push>& dropped() const { return dropped_; }

 private:
  enum class State { present, awaited, gone };
  struct Worker {
    State state = State::present;
    std::int64_t steps = 0, last_used = 0, last_update = 0;
    std::optional<Push> waiting{};
    bool claimed = false;
    std::optional<Outcome> outcome{};
  };
  Worker& at(int worker) { return workers_[static_cast<std::size_t>(worker)]; }
  const Worker& at(int worker) const { return workers_[static_cast<std::size_t>(worker)]; }
  bool late(const Push& push) const;
  void settle(int worker, std::int64_t step, bool used);
  void forget(int worker);

  Rules rules_;
  std::int64_t version_;
  std::vector<Worker> workers_;
  std::vector<int> arrived_;  // workers whose gradients wait, in the order in which these came
  std::vector<Push> dropped_;
};

}  // namespace bonfire
