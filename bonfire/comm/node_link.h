#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "bonfire/comm/failure.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_client.h"

namespace bonfire {

// What the launchers of several nodes tell each other during one attempt: that a rank failed, or that all of a node's ranks
// have ended well. A launcher that vanishes counts as a failure of its node.
class NodeLink {
 public:
  struct Options {
    int node = 0;
    int nodes = 1;
    int attempt = 0;
  };
  NodeLink(StoreClient& client, Options options);
  ~NodeLink();

  // Readable once there is news.
  int news() const { return news_.fd(); }
  // The first failure anywhere, once it is known.
  std::optional<RankFailure> failure() const;
  // All ranks of all nodes have ended well.
  bool over() const { return over_; }

  // This node's first failure; the answer is the job's, which may be another node's.
  RankFailure tell(const RankFailure& failure);
  // All ranks of this node have ended well.
  void ended();
  // All of this node's ranks are stopped, another attempt is wanted: waits until all nodes say so. False: somebody is
  // missing.
  bool ready_again(std::chrono::milliseconds timeout);

 private:
  void listen();
  void announce();
  std::string key(const char* what) const;

  StoreClient& client_;
  Options options_;
  Socket news_;
  mutable std::mutex mutex_;
  std::optional<RankFailure> failure_;
  std::atomic<bool> over_{false};
  std::atomic<bool> stopping_{false};
  std::optional<StoreClient::Presence> presence_;
  std::thread thread_;
};

}  // namespace bonfire
