#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/members.h"

namespace bonfire {

// Where one rank stands, as the others may know it: a plain value that travels through the store.
struct Progress {
  // One group this rank belongs to. Collectives are counted over all members alike, so their numbers can be compared;
  // sends and receives are not, so they have numbers of their own.
  struct Lane {
    std::string group;
    Members ranks;  // by their number in the World
    struct Place {
      std::int64_t begun = 0;  // number of the last one issued; 0: none yet
      std::int64_t ended = 0;  // number of the last one known to be complete
      CollectiveKind kind = CollectiveKind::barrier;
      double age = 0;  // seconds since the last one was issued, at the time of the snapshot
    };
    Place collective;
    Place message;
  };

  std::vector<Lane> lanes;
  std::string busy;         // host work that may take long, such as "checkpoint"; empty: none
  std::int64_t step = -1;   // the last step finished; -1: none
  double step_seconds = 0;  // how long it took
  double own_seconds = 0;   // the part of it in which this rank waited for nobody
  bool finished = false;    // this rank has left the run in good order
};

// What a rank notes while it runs, so that a watchdog can say who is behind and where. Written by the rank's threads, read
// by the watchdog's: a note costs a few stores and a lock that nobody else holds.
class BONFIRE_API ProgressBoard {
 public:
  ProgressBoard() = default;
  ProgressBoard(const ProgressBoard&) = delete;
  ProgressBoard& operator=(const ProgressBoard&) = delete;

  class BONFIRE_API Lane {
   public:
    Lane(std::string group, std::vector<int> ranks) : group_(std::move(group)), ranks_(std::move(ranks)) {}

    // A collective (or a send, or a receive) was issued. `sequence` counts from 1 within the group, separately for
    // collectives and for messages.
    void begin(std::int64_t sequence, CollectiveKind kind);
    // It is known to be complete. May be called late, out of order, or not at all for some.
    void end(std::int64_t sequence, CollectiveKind kind);
    // It is complete when `ended` says so, which look() asks. Those that were issued before one that has
    // ended are taken to have ended, too, and are not asked any more.
    void watch(std::int64_t sequence, CollectiveKind kind, std::function<bool()> ended);

   private:
    friend class ProgressBoard;
    struct Place {
      std::atomic<std::uint64_t> begun{0};  // sequence and kind in one word, so that they never tear
      std::atomic<std::int64_t> begun_at{0};
      std::atomic<std::int64_t> ended{0};

      struct Watched {
        std::int64_t sequence;
        std::function<bool()> ended;
      };
      std::mutex mutex;
      std::deque<Watched> watched;  // in order of issue; guarded by `mutex`
      std::size_t trim_at = 64;     // where nobody reads, the rank itself trims the list when it is this long
      void end(std::int64_t sequence);
      void settle();
    };
    static Progress::Lane::Place read(const Place& place, Nanoseconds now);
    Place& place(CollectiveKind kind);

    std::string group_;
    std::vector<int> ranks_;
    Place collective_;
    Place message_;
  };

  // A lane for a new group; it lives as long as the board.
  Lane& lane(std::string group, std::vector<int> world_ranks);

  // Held while a thread of this rank waits for other ranks (inside Work::wait): what is left of a step is the rank's own
  // time, which shows the straggler although all ranks' steps take equally long. A null board costs nothing.
  class BONFIRE_API Waiting {
   public:
    explicit Waiting(ProgressBoard* board) : board_(board), start_(board ? now_ns() : 0) {}
    ~Waiting() {
      if (board_) board_->waited_.fetch_add(now_ns() - start_, std::memory_order_relaxed);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    ProgressBoard* board_;
    Nanoseconds start_;
  };

  // Held during host work that may take long while others wait (a checkpoint, an evaluation on one rank): no watchdog calls
  // this rank late meanwhile. `what` must be a string literal. A null board costs nothing.
  class BONFIRE_API Busy {
   public:
    Busy(ProgressBoard* board, const char* what) : board_(board) {
      if (board_) before_ = board_->busy_.exchange(what, std::memory_order_relaxed);
    }
    ~Busy() {
      if (board_) board_->busy_.store(before_, std::memory_order_relaxed);
    }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    ProgressBoard* board_;
    const char* before_ = nullptr;
  };

  // The optimizer step with this number is done. REQUIRES: called from one thread.
  void finish_step(std::int64_t step);
  // This rank leaves the run in good order: it is late for nothing from now on.
  void finish();

  // Asks the watched collectives which of them have ended; a watchdog does so before it takes a snapshot.
  void look();
  Progress snapshot() const;

 private:
  mutable std::mutex mutex_;  // guards the list of lanes, not their content
  std::deque<Lane> lanes_;
  std::atomic<const char*> busy_{nullptr};
  std::atomic<std::int64_t> waited_{0};
  std::atomic<std::int64_t> step_{-1};
  std::atomic<std::int64_t> step_ns_{0};
  std::atomic<std::int64_t> own_ns_{0};
  std::atomic<bool> finished_{false};
  Nanoseconds step_start_ = now_ns();
  std::int64_t waited_before_ = 0;
};

// The wire form of a Progress, in two parts: which groups there are, which is said once, and the numbers, which are said
// again and again and whose length does not depend on how many ranks the groups have.
BONFIRE_API std::string encode_lanes(const Progress& progress);
BONFIRE_API std::string encode_numbers(const Progress& progress);
// Nothing where a text is not what it should be.
BONFIRE_API std::optional<std::vector<Progress::Lane>> decode_lanes(const std::string& text);
// The groups that the numbers speak of; nothing where they are none.
BONFIRE_API std::optional<std::size_t> lanes_of(const std::string& numbers);
// REQUIRES: `lanes` are at least as many as the numbers speak of.
BONFIRE_API std::optional<Progress> decode_progress(const std::string& numbers, const std::vector<Progress::Lane>& lanes);

}  // namespace bonfire
