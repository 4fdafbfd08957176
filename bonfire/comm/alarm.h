#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"

namespace c10d {
class Store;
}

namespace bonfire {

// How a rank that fails between collectives tells the others, which may be waiting for it in one of them; and how ranks that
// have all failed alike find out that nobody waits for anybody, so that they may go on. One for each rank of a World, and
// one more for each part of it that works by itself: what is wrong there beyond repair, the whole World hears.
class BONFIRE_API Alarm {
 public:
  struct Part {
    std::string name = "alarm";
    int size = 1;                    // ranks that must have failed alike
    std::shared_ptr<Alarm> of = {};  // of the whole; null: this is it
  };
  Alarm(c10::intrusive_ptr<c10d::Store> store, int rank, Part part);

  // This rank failed, and says why in the first line of `words`. `place` counts what it has issued: it is the same on ranks
  // that failed at the same place. Waits for the others' word, no longer than `patience`. True: all ranks failed at that
  // place, and may go on. False: from now on every wait and every collective of this World throws the words of the rank that
  // failed first.
  bool raise(const std::string& words, std::int64_t place, std::chrono::milliseconds patience);
  // Throws PeerLost where a rank has raised the alarm. Asks the store: for somebody who has waited for a while. A store that
  // does not answer within seconds, or is gone, knows of no alarm: its host may be stopped, and others look after that.
  void ask();
  // The same as far as this rank knows already.
  void check() const;
  bool known() const { return broken_.load(std::memory_order_acquire) || (part_.of && part_.of->known()); }

 private:
  std::string key() const;
  std::string words_of_first() const;
  void hear();
  // Part of this World failed beyond repair: everybody hears it.
  void sound(const std::string& words, std::int64_t place);
  void speak(const std::string& words, std::int64_t place);
  std::string verdict(const std::string& said);  // what was said first
  void give_up();

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  Part part_;
  mutable std::mutex mutex_;
  std::int64_t epoch_ = 0;  // alarms that all ranks have survived
  std::string words_;
  std::atomic<bool> broken_{false};
  std::mutex asking_;
  std::future<void> question_;  // last: its end is waited for while the rest is still there
};

}  // namespace bonfire
