#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bonfire/comm/group.h"
#include "bonfire/server/ledger.h"
#include "bonfire/server/peer.h"
#include "bonfire/server/served_shares.h"
#include "bonfire/server/server.h"

namespace bonfire {

// A thread for each worker receives its gradients and sends it new weights; the one that called serve() updates.
struct Server::State {
  State(const World& world, const ServerOptions& options, const MakeOptimizer& make);
  ~State();

  // What a worker's gradients come into, and what new weights go out from: never both at once.
  struct Slot {
    std::vector<at::Tensor> gradients, averages, weights;  // by region, in the same memory
  };
  struct Session {
    int worker = 0;
    std::unique_ptr<Peer> peer;
    std::int64_t life = 1;
    std::vector<Slot> slots;             // by Unit
    std::vector<std::int64_t> versions;  // of the weights that made the gradients that are coming in
    std::size_t pushed = 0;              // Units
    // What its next answers say of its last gradients.
    bool used = true;
    double norm = 0, number = 0;
    bool lost_elsewhere = false;  // another server waited for its gradients, and it was lost
    std::thread thread;
  };

  // --- sessions.cpp: the threads of the workers.
  void connect(Session& session, std::function<void()> look = {});
  void greet(Session& session, const MakeOptimizer& make);
  void make_slots(Session& session);
  void run(Session& session);
  bool hear(Session& session);
  void await_and_answer(Session& session);
  // Until `ready`, which is asked under `mutex`. Throws PeerLost where the worker was lost meanwhile.
  void await_others(Session& session, const std::function<bool()>& ready);
  void answer(Session& session, std::int64_t version);
  // The version that was copied.
  std::int64_t copy_weights(Session& session, std::size_t unit, std::int64_t at_least);
  // Whether what answers gradients of this version is their average. Greetings are answered with weights.
  bool averages(std::int64_t version) const { return options.pulled == Pulled::gradients && version > 0; }
  // False: it is not waited for.
  bool lose(Session& session, const std::string& why);
  void await_return(Session& session);
  void reconnect(Session& session);
  std::int64_t await_life(const Session& session);
  std::int64_t lives(const Session& session) const;
  void give_up(std::exception_ptr error);
  std::string name_of(const Session& session) const;

  // --- server.cpp: the thread that updates.
  std::optional<std::vector<int>> agree();
  void update(const std::vector<int>& workers);
  void sum_up(const std::vector<int>& workers);
  void unit_updated(std::size_t unit);
  void note(ServerUpdate& update);
  bool together() const { return options.mode == ServerMode::synchronous; }
  void throw_if_over();

  World world;
  ServerOptions options;
  int workers;
  World among_servers;
  Group servers;
  Ports ports;
  std::string description;
  std::optional<at::ScalarType> gradients;  // of workers; nothing: the masters'
  std::unique_ptr<ServedShares> shares;
  std::unique_ptr<Optimizer> optimizer;

  std::mutex updating;       // held during an update, before any of the others
  mutable std::mutex mutex;  // of all that follows
  std::condition_variable changed;
  Ledger ledger;
  std::vector<Session> sessions;
  std::vector<std::int64_t> unit_versions;
  std::int64_t durable = 0;
  std::vector<int> dropped_workers;
  std::int64_t changes = 0;  // of the ledger
  std::exception_ptr error;
  std::atomic<bool> over{false};
  ServerReport report;
  double stale_sum = 0;
  std::int64_t stale_count = 0;

  // Held while a Unit's weights are written or copied. All are taken before an update, and each is released when its Unit
  // has its new values. Taken in the order of the Units, and after `mutex` never.
  std::vector<std::unique_ptr<std::mutex>> unit_mutexes;
  std::size_t unlocked = 0;    // Units of the update that is under way
  std::int64_t under_way = 0;  // its version
};

}  // namespace bonfire
