#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"

namespace c10d {
class Store;
}

namespace bonfire {

// How ranks that were asked to end a run, each at its own moment, agree on the step after which they do. Each says which
// step it is in; the last of them is the run's last step. Ranks that are lost for good are not waited for. Nothing is sent
// before somebody asks.
class BONFIRE_API StopVote {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::int64_t first_step = 1;
    bool returned = false;  // this rank was lost and is back: the others may have agreed meanwhile
    // How long a rank waits for the others' votes. Where somebody was not asked, the run goes on, and a line says so.
    std::chrono::milliseconds patience = std::chrono::seconds(30);
    // Called by is_last() where the run goes on although this rank was asked.
    std::function<void()> failed{};
    Log log{};
  };
  StopVote(c10d::Store& store, Options options);
  ~StopVote();
  StopVote(const StopVote&) = delete;
  StopVote& operator=(const StopVote&) = delete;

  // This rank was asked. From any thread, so that it is heard while the rank waits for another one inside of a step.
  void ask();
  // `step` has ended. True: it is the last one, on all ranks. REQUIRES: called for every step, in order, by one thread; or
  // on all ranks for an earlier step again, and for all that follow it.
  bool is_last(std::int64_t step);

 private:
  std::string key(const std::string& what) const;
  void conclude(c10d::Store& store) const;
  void conclude_without_the_lost(c10d::Store& store) const;
  void hear();
  // The last step, once all have voted; nothing where the vote has failed.
  std::optional<std::int64_t> decision();

  c10::intrusive_ptr<c10d::Store> votes_, decisions_;  // two, for one of them may wait
  Options options_;
  std::mutex mutex_;
  std::int64_t round_ = 0;
  std::int64_t current_;                  // step
  std::optional<std::int64_t> promised_;  // not to go beyond without a decision
  std::optional<std::int64_t> decided_;
};

}  // namespace bonfire
