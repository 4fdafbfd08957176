#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/failure.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_errands.h"

namespace bonfire {

// What the launchers of several nodes tell each other during one attempt: that a rank failed, that somebody asked the run to
// stop, that a launcher is stopped for a while (Ctrl-Z), or that all of a node's ranks have ended well. A launcher that
// vanishes counts as a failure of its node. Whoever tells something waits for nobody: a store that does not answer keeps no
// launcher from hearing its own signals. While a launcher is said to be stopped, a store that is silent is no news.
class BONFIRE_API NodeLink {
 public:
  struct Options {
    int node = 0;
    int nodes = 1;
    int attempt = 0;
    StoreClientOptions store;
  };
  // What ends an attempt on all nodes: the first of these that anybody tells.
  struct News {
    std::optional<RankFailure> failure = {};
    int stop_signal = 0;  // that a launcher was sent
    int stop_node = 0;    // whose
    bool over = false;    // all ranks of all nodes have ended well
  };
  // Connects meanwhile; where that fails, it is news.
  explicit NodeLink(Options options);
  // Takes leave, for which it waits no longer than some seconds; node 0 also for nodes that have yet to come, so that they
  // hear how the attempt ended.
  ~NodeLink();

  // Readable once there is news, a signal to pass on, a pause or its end, or an answer to ready().
  int readable() const { return readable_.fd(); }
  std::optional<News> news() const;
  // SIGUSR1 was sent to another node's launcher; true once.
  bool take_user_signal();
  // Another node whose launcher is stopped and goes on later; the lowest of several.
  std::optional<int> paused_by() const;

  // This node's first failure. What ends the attempt, which may be another node's, comes as news.
  void tell(const RankFailure& failure);
  // This node's launcher was asked to stop. To be told before its ranks are: those of other nodes will lose them.
  void tell_stop(int signal);
  void tell_user_signal();
  // This launcher is about to be stopped: waits until all others know, but not longer than that.
  void pause(std::chrono::milliseconds most);
  // It goes on.
  void resume();
  // All ranks of this node have ended well.
  void ended();
  // Waits until all that was told has arrived; false at the limit.
  bool told(std::chrono::milliseconds most) { return errands_.done(most); }
  // All of this node's ranks have ended, and another attempt is wanted.
  void ready(std::chrono::milliseconds timeout);
  // Whether all nodes are ready; false: somebody is missing. Nothing: that is not known yet.
  std::optional<bool> all_ready() const;
  // No other attempt is wanted: whoever is ready does not wait for this node.
  void not_again();

 private:
  void join(StoreClient& client);
  void listen(StoreClient& client);
  void listen_for_events(StoreClient& client);
  void take(StoreClient& client, std::int64_t number, const std::string& event);
  void tell_event(const std::string& what);
  void post(StoreClient& client, const std::string& event);
  void listen_for_all(StoreClient& client, std::chrono::milliseconds timeout);
  void learn(News news);
  void learn_that_the_store_is_gone(const Error& error);
  bool excused(int pauses_before);
  bool paused(int node) const;
  void forget_the_lost(StoreClient& client);
  void announce();
  void wait_for_latecomers(StoreClient& client);
  std::string key(const std::string& what) const;
  // "here": set once that launcher has joined; "gone": where it has ended without taking leave; "ready": whether it wants
  // another attempt.
  std::string key_of(const std::string& what, int node) const;
  std::vector<std::string> keys_of_all(const std::string& what) const;

  Options options_;
  Socket readable_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<News> news_;
  std::optional<bool> all_ready_;
  std::set<int> paused_;  // other nodes whose launchers are stopped
  bool ending_ = false;
  std::atomic<int> pauses_{0};  // that have begun, of any launcher
  std::atomic<bool> user_signal_{false};
  int events_told_ = 0;
  std::int64_t last_event_ = 0;                           // the errands': behind which one the last was posted
  std::optional<StoreClient::Presence> presence_, gone_;  // the same
  std::thread listener_, events_, all_;                   // the same, until those have ended
  StoreErrands errands_;
};

}  // namespace bonfire
