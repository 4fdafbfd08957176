#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "bonfire/base/api.h"
#include "bonfire/comm/store_client.h"

namespace bonfire {

// What a launcher has to tell the store, one thing after the other on a thread of its own: a store that does not answer
// keeps nobody from hearing signals, or from ending.
class BONFIRE_API StoreErrands {
 public:
  using Errand = std::function<void(StoreClient&)>;
  struct Options {
    StoreClientOptions store;
    // An errand, or the connection before it, threw. True: it is to be tried again after a pause.
    std::function<bool(const Error&)> failed;
    std::chrono::milliseconds pause = std::chrono::seconds(1);
  };
  explicit StoreErrands(Options options);
  ~StoreErrands() { end(); }
  StoreErrands(const StoreErrands&) = delete;
  StoreErrands& operator=(const StoreErrands&) = delete;

  void run(Errand errand);
  // Waits until all are done; false at the limit.
  bool done(std::chrono::milliseconds most);
  // Ends whatever call is under way, also those of other threads with this client. Nothing is done any more.
  void end();

 private:
  void work();
  void attempt(const Errand& errand);

  Options options_;
  Socket given_up_;  // readable once nobody waits any more
  std::unique_ptr<StoreClient> client_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Errand> errands_;  // the first one is under way
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace bonfire
