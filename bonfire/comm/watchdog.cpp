#include "bonfire/comm/watchdog.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/beats.h"
#include "bonfire/comm/running_clock.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;

constexpr const char* kVerdict = "watchdog/verdict";
constexpr int kWatchers = 2;  // so that one of them may itself be the one that stands still

}  // namespace

class Watchdog::Loop {
 public:
  Loop(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<ProgressBoard> board, WatchdogOptions options)
      : store_(store->clone()),
        board_(std::move(board)),
        options_(std::move(options)),
        beats_(*store_, options_.rank, options_.size, clock_.now()),
        stragglers_(options_.straggler_factor) {
    if (options_.interval == 0ms) {
      double shortest = 10;
      for (const double limit : {options_.limits.silent, options_.limits.behind})
        if (limit > 0) shortest = std::min(shortest, limit);
      options_.interval = std::chrono::milliseconds(std::max(20, static_cast<int>(shortest * 100)));
    }
    thread_ = std::thread([this] { run(); });
  }

  ~Loop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
    board_->finish();
    try {
      publish();
    } catch (const std::exception&) {
      // Whoever hosts the store has gone first: nobody watches any more.
    }
  }

 private:
  void run() {
    Nanoseconds answered = clock_.now();
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, options_.interval, [this] { return stopping_; })) {
      lock.unlock();
      try {
        publish();
        if (store_->check({kVerdict})) return end(store_->get_to_str(kVerdict));
        if (options_.rank < kWatchers && options_.size > 1) watch();
        answered = clock_.now();
      } catch (const std::exception& error) {
        if (options_.limits.silent > 0 && since(answered) > options_.limits.silent)
          return end(fmt::format("rank {} cannot reach the job's store for {:.1f} s: {}", options_.rank, since(answered),
                                 first_line(error.what())));
      }
      lock.lock();
    }
  }

  double since(Nanoseconds then) const { return static_cast<double>(clock_.now() - then) * 1e-9; }

  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  void publish() {
    board_->look();
    Progress progress = board_->snapshot();
    for (Progress::Lane& lane : progress.lanes)
      for (Progress::Lane::Place* place : {&lane.collective, &lane.message}) place->age = clock_.running(place->age);
    beats_.publish(progress);
  }

  void watch() {
    std::vector<Observed> ranks;
    for (const Beats::Seen& seen : beats_.look(clock_.now())) {
      Observed& rank = ranks.emplace_back(Observed{seen.progress, since(seen.at)});
      // Others have waited for a busy rank, too: their time begins when it is known not to be any more.
      Busy& busy = busy_[ranks.size() - 1];
      const bool still = !seen.progress.busy.empty();
      if (still || busy.now) busy = {still, still ? seen.at : clock_.now()};
      if (busy.until > 0) rank.free = since(busy.until);
    }
    // Who holds a rank is asked only where it matters.
    if (find_stall(ranks, options_.limits)) {
      ask_who_is_held(ranks);
      ask_who_is_lost(ranks);
      if (const auto stall = find_stall(ranks, options_.limits)) store_->compareSet(kVerdict, "", *stall);
    }
    if (options_.rank == 0) look_for_straggler();
  }

  void ask_who_is_held(std::vector<Observed>& ranks) {
    if (!store_->check({kAnyHeld})) return;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::string key = held_key(static_cast<int>(rank));
      if (!store_->check({key})) continue;
      const std::string text = store_->get_to_str(key);
      Hold& hold = holds_[rank];
      if (says_held(text) || text != hold.text) hold = {text, clock_.now()};
      ranks[rank].free = std::min(ranks[rank].free, since(hold.seen));
    }
  }

  // Those that come back are waited for as if somebody held them.
  void ask_who_is_lost(std::vector<Observed>& ranks) {
    if (!store_->check({kAnyLost})) return;
    const auto text_at = [&](const std::string& key) { return store_->check({key}) ? store_->get_to_str(key) : ""; };
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const std::string lost = text_at(lost_key(static_cast<int>(rank)));
      if (lost.empty()) continue;
      ranks[rank].gone = lost_for_good(lost);
      const std::string returned = text_at(returned_key(static_cast<int>(rank)));
      Hold& loss = losses_[rank];
      if (lost != returned || loss.text != returned) loss = {returned, clock_.now()};
      if (!ranks[rank].gone) ranks[rank].free = std::min(ranks[rank].free, since(loss.seen));
    }
  }

  void look_for_straggler() {
    std::vector<Progress> ranks;
    for (const Beats::Seen& seen : beats_.seen()) ranks.push_back(seen.progress);
    const auto slowest = stragglers_.look(ranks);
    if (!slowest) return;
    options_.log.warning("rank {} is the slowest: {:.1f} ms of its own in step {}, the median of all ranks is {:.1f} ms",
                         slowest->rank, slowest->own_seconds * 1e3, ranks[static_cast<std::size_t>(slowest->rank)].step,
                         slowest->median_seconds * 1e3);
  }

  void end(const std::string& verdict) {
    if (options_.on_stall)
      options_.on_stall(verdict);
    else
      options_.log.error("{}", verdict);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<ProgressBoard> board_;
  WatchdogOptions options_;
  RunningClock clock_;
  Beats beats_;
  // What this watcher knows of ranks that were held.
  struct Hold {
    std::string text = {};
    Nanoseconds seen = 0;
  };
  std::map<std::size_t, Hold> holds_, losses_;
  struct Busy {
    bool now = false;
    Nanoseconds until = 0;  // 0: it never was
  };
  std::map<std::size_t, Busy> busy_;
  StragglerWatch stragglers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

Watchdog::Watchdog(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<ProgressBoard> board, WatchdogOptions options)
    : loop_(std::make_unique<Loop>(std::move(store), std::move(board), std::move(options))) {}

Watchdog::~Watchdog() = default;

}  // namespace bonfire
