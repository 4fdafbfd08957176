#pragma once

#include <atomic>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "bonfire/comm/failure.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_client.h"

namespace bonfire {

// What the launchers of several nodes tell each other during one attempt: that a rank failed, that somebody asked the run to
// stop, or that all of a node's ranks have ended well. A launcher that vanishes counts as a failure of its node.
class NodeLink {
 public:
  struct Options {
    int node = 0;
    int nodes = 1;
    int attempt = 0;
  };
  // What ends an attempt on all nodes: the first of these that anybody tells.
  struct News {
    std::optional<RankFailure> failure = {};
    int stop_signal = 0;  // that a launcher was sent
    int stop_node = 0;    // whose
    bool over = false;    // all ranks of all nodes have ended well
  };
  NodeLink(StoreClient& client, Options options);
  ~NodeLink();

  // Readable once there is news, or a signal to pass on.
  int readable() const { return readable_.fd(); }
  std::optional<News> news() const;
  // SIGUSR1 was sent to another node's launcher; true once.
  bool take_user_signal();

  // This node's first failure; the answer is what ends the attempt, which may have been another node's.
  News tell(const RankFailure& failure);
  // This node's launcher was asked to stop. To be told before its ranks are: those of other nodes will lose them.
  void tell_stop(int signal);
  void tell_user_signal();
  // All ranks of this node have ended well.
  void ended();
  // All of this node's ranks are stopped, another attempt is wanted: waits until all nodes say so. False: somebody is
  // missing.
  bool ready_again(std::chrono::milliseconds timeout);

 private:
  void listen();
  void learn(News news);
  void announce();
  std::string key(const char* what) const;

  StoreClient& client_;
  Options options_;
  Socket readable_;
  mutable std::mutex mutex_;
  std::optional<News> news_;
  std::atomic<bool> user_signal_{false};
  std::atomic<bool> told_user_signal_{false};
  std::atomic<bool> stopping_{false};
  std::optional<StoreClient::Presence> presence_;
  std::thread thread_;
  std::future<void> telling_;  // its end is waited for while the rest is still there
};

}  // namespace bonfire
