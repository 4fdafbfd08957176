#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/comm/guardian.h"
#include "bonfire/comm/held_ranks.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/node_link.h"
#include "bonfire/comm/rank_output.h"
#include "bonfire/comm/rank_process.h"
#include "bonfire/comm/signal_events.h"
#include "bonfire/comm/stall.h"
#include "bonfire/comm/terminal.h"

namespace bonfire {

// What all ranks find in their environment, but for their places.
Variables rank_variables(const LauncherOptions& options);

// What a rank that has failed said last, unless a person has read it already.
void report_words(const LauncherOptions& options, const RankFailure& failure);

// The ranks of this node, once from start to end.
class Attempt {
 public:
  struct Setting {
    int number = 0;  // of the attempt
    std::filesystem::path folder;
    Endpoint store;
    NodeLink* link = nullptr;  // null on a single node
    SignalEvents& signals;
    Guardian& guardian;
    Terminal& terminal;
  };
  enum class Ending { well, failed, on_request };

  // `options` must outlive it; their log is one that keeps nobody waiting.
  Attempt(const LauncherOptions& options, Setting setting);

  Ending run();

  const std::optional<RankFailure>& failure() const { return failure_; }
  // Ranks that the others have gone on without.
  const std::vector<int>& dropped() const { return dropped_; }
  // By a signal to a launcher, also where the attempt had failed already.
  bool asked_to_stop() const { return asked_to_stop_; }
  // All ranks that ended on request had saved before.
  bool saved() const { return saved_ && !unsaved_; }

 private:
  struct Rank {
    RankProcess process;
    RankOutput output;
    std::string log_file;
    std::string error_file;
    int returns = 0;  // how often it was started again alone
    bool alive = true;
    bool stopped = false;    // by SIGSTOP
    bool end_known = false;  // `process.end` says that it has ended; whoever traces it may have to hear of it first
  };

  void start();
  Rank start(int local, int returns);
  Variables common_variables() const;
  int living() const;
  void wait_for_events();
  void keep_deadlines();

  void handle(int signal);
  void stop(int signal, const std::string& where);
  void pause();
  void follow_pauses();
  void go_on();
  void postpone(std::chrono::nanoseconds time);
  void signal_all(int signal) const;
  void pass_on(int signal);
  void wake_stopped() const;

  void reap();
  void note_stop(Rank& rank, int signal);
  void note_end(Rank& rank, const siginfo_t& how);
  void note_failure(RankFailure failure);
  bool may_be_lost(const RankFailure& failure) const;
  void settle_losses();
  void lose(const RankFailure& failure);
  std::string loss_file(int rank) const;
  void look_for_debuggers();

  Deadline settled() const;
  void choose_failure();
  void hear(const NodeLink::News& news);
  void end_because(const RankFailure& failure);

  const LauncherOptions& options_;
  Setting setting_;
  const Variables variables_;  // of every rank, but for its place
  StallLimits limits_;
  HeldRanks held_;
  std::vector<Rank> ranks_;
  std::vector<RankFailure> failures_;
  std::vector<int> done_;  // ended well
  // Ranks that have ended and may be lost, until it is known that nobody else's failure was the reason.
  struct Loss {
    RankFailure failure;
    Deadline at;
  };
  std::vector<Loss> losses_;
  std::vector<int> dropped_;
  std::optional<RankFailure> failure_;
  // What this node has told the others, until they answer.
  struct Told {
    RankFailure failure;
    Deadline at;
  };
  std::optional<Told> told_failure_;
  Deadline first_seen_{};  // the first of failures_
  Deadline looked_{};      // for debuggers
  std::optional<Deadline> kill_at_;
  bool ending_ = false;  // because of a failure
  bool asked_to_stop_ = false;
  std::optional<Deadline> first_request_;  // by SIGINT or SIGTERM
  bool killed_ = false;                    // by a second one
  int passed_on_ = 0;                      // the last request
  bool pausing_ = false;                   // with this launcher
  std::optional<Deadline> paused_since_;   // because of another node's launcher
  bool saved_ = false;                     // a rank ended with code 3
  bool unsaved_ = false;                   // a rank was asked to end and did so without saving
  std::optional<Deadline> told_ended_;
};

}  // namespace bonfire
