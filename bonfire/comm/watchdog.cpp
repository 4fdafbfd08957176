#include "bonfire/comm/watchdog.h"

#include <algorithm>
#include <condition_variable>
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
constexpr int kWatchers = 2;         // so that one of them may itself be the one that stands still
constexpr int kStragglerSteps = 10;  // in a row, before it is worth a word

}  // namespace

class Watchdog::Loop {
 public:
  Loop(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<ProgressBoard> board, WatchdogOptions options)
      : store_(store->clone()),
        board_(std::move(board)),
        options_(std::move(options)),
        beats_(*store_, options_.rank, options_.size, clock_.now()) {
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
    for (const Beats::Seen& seen : beats_.look(clock_.now())) ranks.push_back({seen.progress, since(seen.at)});
    // Who holds a rank is asked only where it matters.
    if (find_stall(ranks, options_.limits)) {
      for (std::size_t rank = 0; rank < ranks.size(); ++rank)
        ranks[rank].held = store_->check({held_key(static_cast<int>(rank))});
      if (const auto stall = find_stall(ranks, options_.limits)) store_->compareSet(kVerdict, "", *stall);
    }
    if (options_.rank == 0) look_for_straggler();
  }

  void look_for_straggler() {
    if (options_.straggler_factor <= 0) return;
    std::vector<Progress> ranks;
    for (const Beats::Seen& seen : beats_.seen()) ranks.push_back(seen.progress);
    const auto slowest = find_straggler(ranks, options_.straggler_factor);
    if (!slowest) {
      slow_steps_ = 0;
      return;
    }
    const std::int64_t step = ranks[static_cast<std::size_t>(slowest->rank)].step;
    if (slowest->rank != slow_rank_) slow_steps_ = 0;
    if (slow_steps_ > 0 && step == slow_step_) return;  // seen already
    slow_rank_ = slowest->rank;
    slow_step_ = step;
    if (++slow_steps_ != kStragglerSteps) return;
    options_.log.warning("rank {} is the slowest: {:.1f} ms of its own in step {}, the median of all ranks is {:.1f} ms",
                         slowest->rank, slowest->own_seconds * 1e3, step, slowest->median_seconds * 1e3);
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
  int slow_rank_ = -1;
  std::int64_t slow_step_ = -1;
  int slow_steps_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

Watchdog::Watchdog(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<ProgressBoard> board, WatchdogOptions options)
    : loop_(std::make_unique<Loop>(std::move(store), std::move(board), std::move(options))) {}

Watchdog::~Watchdog() = default;

}  // namespace bonfire
