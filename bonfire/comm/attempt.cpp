#include "bonfire/comm/attempt.h"

#include <poll.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include <fmt/ranges.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/stop_signals.h"
#include "bonfire/comm/wait_policy.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// After the first sign of trouble: how long to collect what else fails, before choosing which one was first.
constexpr auto kSettle = 200ms;
// The same where all that failed had only lost another rank: that one has yet to end, or is on another node.
constexpr auto kSettleVictims = 2s;
// How often to look around although nothing seems to have happened; the latter where the kernel does not tell of ends.
constexpr auto kLook = 1s;
// How long the other nodes have to say whether something failed there first, or to hear that this one stops.
constexpr auto kOtherNodes = 5s;
constexpr auto kTold = 2s;
constexpr auto kLookOften = 50ms;

std::string file_name(int rank, int attempt, int returns, const char* kind) {
  const auto part = [](const char* word, int times) { return times == 0 ? "" : fmt::format(".{}-{}", word, times); };
  return fmt::format("rank-{}{}{}.{}", rank, part("restart", attempt), part("return", returns), kind);
}

}  // namespace

void report_words(const LauncherOptions& options, const RankFailure& failure) {
  const bool shown_as_it_is = options.echo == Echo::first && failure.rank == 0;
  if (!shown_as_it_is) {
    if (const std::string words = last_words_of(failure); !words.empty()) options.log.error("{}", words);
  }
  if (failure.note && !failure.note->details.empty()) options.log.error("more about it is in {}", failure.log_file);
}

Variables rank_variables(const LauncherOptions& options) {
  Variables variables = process_variables();
  // These would make a rank believe in a torchrun agent around the launcher.
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}) variables.erase(name);
  for (const auto& [name, value] : options.variables) variables[name] = value;
  return variables;
}

Attempt::Attempt(const LauncherOptions& options, Setting setting)
    : options_(options),
      setting_(std::move(setting)),
      variables_(common_variables()),
      limits_(StallLimits::from(variables_)),
      held_({.store = {.server = setting_.store, .token = options.token, .connect_timeout = 5s, .answer_timeout = 5s},
             .attempt = setting_.number,
             .log = options.log}) {}

Attempt::Ending Attempt::run() {
  start();
  NodeLink* const link = setting_.link;
  while (true) {
    wait_for_events();
    for (Rank& rank : ranks_) rank.output.take(rank.process.out, rank.process.err);
    while (const int signal = setting_.signals.next()) handle(signal);
    reap();
    look_for_debuggers();
    if (setting_.guardian.renew()) options_.log.warning("the launcher's guardian was killed: another one was started");
    if (link != nullptr) {
      if (link->take_user_signal()) pass_on(SIGUSR1);
      if (const auto news = link->news(); news && !news->over) hear(*news);
      follow_pauses();
    }
    if (paused_since_) continue;
    keep_deadlines();
    if (living() > 0 || !losses_.empty()) continue;
    if (ending_ || asked_to_stop_ || link == nullptr) break;
    if (told_failure_) continue;
    if (!told_ended_) {
      link->ended();
      told_ended_ = Clock::now();
    }
    if (const auto news = link->news(); news && news->over) break;
    // Ranks that stopped on request did so together: who has not heard of the others by now will not.
    if (saved_ && Clock::now() >= *told_ended_ + kOtherNodes) break;
  }
  for (Rank& rank : ranks_) {
    rank.output.take(rank.process.out, rank.process.err);
    rank.output.finish();
    std::error_code ignored;
    if (options_.lost) std::filesystem::remove(loss_file(rank.process.rank), ignored);
  }
  if (failure_) return Ending::failed;
  return saved_ || unsaved_ ? Ending::on_request : Ending::well;
}

// What is done about ranks that have failed, or that were to end by now.
void Attempt::keep_deadlines() {
  const Deadline now = Clock::now();
  settle_losses();
  const bool undecided = !ending_ && !asked_to_stop_;
  if (undecided && !failures_.empty() && (now >= settled() || living() == 0)) choose_failure();
  if (undecided && told_failure_ && now >= told_failure_->at + kOtherNodes) end_because(told_failure_->failure);
  if (kill_at_ && Clock::now() >= *kill_at_) {
    signal_all(SIGKILL);
    kill_at_.reset();
  }
}

void Attempt::start() {
  for (int local = 0; local < options_.ranks; ++local) try {
      if (options_.lost) std::filesystem::remove(loss_file(options_.node * options_.ranks + local));
      ranks_.push_back(start(local, 0));
      setting_.guardian.watch(ranks_.back().process.pid);
    } catch (...) {
      signal_all(SIGKILL);
      for (const Rank& rank : ranks_) {
        setting_.guardian.forget(rank.process.pid);
        waitpid(rank.process.pid, nullptr, 0);
      }
      throw;
    }
}

Attempt::Rank Attempt::start(int local, int returns) {
  const int number = options_.node * options_.ranks + local;
  const std::string log_file = (setting_.folder / file_name(number, setting_.number, returns, "log")).string();
  const std::string error_file = (setting_.folder / file_name(number, setting_.number, returns, "error")).string();
  std::filesystem::remove(error_file);
  RankOutput output({.file = log_file,
                     .prefix = fmt::format("[rank {}] ", number),
                     .echo = options_.echo == Echo::all || (options_.echo == Echo::first && number == 0),
                     .raw = options_.echo == Echo::first,
                     .log = options_.log},
                    setting_.terminal);
  Variables variables = variables_;
  variables["RANK"] = std::to_string(number);
  variables["LOCAL_RANK"] = std::to_string(local);
  variables["BONFIRE_ERROR_FILE"] = error_file;
  if (options_.lost && number >= options_.lost->from) variables["BONFIRE_MAY_BE_LOST_FILE"] = loss_file(number);
  if (returns > 0) variables["BONFIRE_RETURNS"] = std::to_string(returns);
  RankProcess process =
      start_rank(number, {options_.program, variables, setting_.signals.ignored(), options_.ranks_take_signals});
  return {std::move(process), std::move(output), log_file, error_file, returns};
}

// Where a rank says that its loss can be borne.
std::string Attempt::loss_file(int rank) const {
  return (setting_.folder / file_name(rank, setting_.number, 0, "may-be-lost")).string();
}

Variables Attempt::common_variables() const {
  Variables variables = rank_variables(options_);
  if (variables["OMP_NUM_THREADS"].empty())
    variables["OMP_NUM_THREADS"] = std::to_string(threads_per_rank(variables, options_.ranks, usable_cores()));
  spin_shortly(variables);
  variables["WORLD_SIZE"] = std::to_string(options_.ranks * options_.nodes);
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options_.ranks);
  variables["GROUP_RANK"] = std::to_string(options_.node);
  variables["MASTER_ADDR"] = setting_.store.host;
  variables["MASTER_PORT"] = std::to_string(setting_.store.port);
  if (!options_.address.empty()) variables["BONFIRE_ADDRESS"] = options_.address;
  variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(setting_.number);
  variables["TORCHELASTIC_RUN_ID"] = to_string(setting_.store);
  variables.insert_or_assign("BONFIRE_LAUNCHER", std::string(1, '1'));
  variables["BONFIRE_TOKEN"] = options_.token;
  // Not what a launcher around this one has said of its own.
  for (const char* name : {"BONFIRE_WHEN_LOST", "BONFIRE_MAY_BE_LOST_FILE", "BONFIRE_RETURNS"}) variables.erase(name);
  if (options_.lost) variables["BONFIRE_WHEN_LOST"] = name_of(options_.lost->policy);
  return variables;
}

int Attempt::living() const {
  return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; }));
}

void Attempt::wait_for_events() {
  std::vector<pollfd> entries = {{setting_.signals.fd(), POLLIN, 0}};
  std::vector<std::pair<std::size_t, Rank*>> ends;  // which entry tells of whose
  Deadline next = Clock::now() + kLook;
  for (Rank& rank : ranks_) {
    for (const Socket* pipe : {&rank.process.out, &rank.process.err})
      if (*pipe) entries.push_back({pipe->fd(), POLLIN, 0});
    if (!rank.alive) continue;
    if (rank.process.end && !rank.end_known) {
      ends.emplace_back(entries.size(), &rank);
      entries.push_back({rank.process.end.fd(), POLLIN, 0});
    } else {
      next = std::min(next, Clock::now() + kLookOften);
    }
  }
  const bool listening = setting_.link != nullptr && !setting_.link->news();
  if (listening) entries.push_back({setting_.link->readable(), POLLIN, 0});
  if (!failures_.empty() && !ending_ && !asked_to_stop_ && !paused_since_)
    next = std::min(next, told_failure_ ? told_failure_->at + kOtherNodes : settled());
  if (kill_at_ && !paused_since_) next = std::min(next, *kill_at_);
  if (!paused_since_)
    for (const Loss& loss : losses_) next = std::min(next, loss.at);
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  poll(entries.data(), entries.size(), static_cast<int>(std::max<long long>(left, 0)));
  for (const auto& [entry, rank] : ends) rank->end_known = entries[entry].revents != 0;
}

void Attempt::handle(int signal) {
  if (signal == SIGTSTP) return pause();
  if (signal == SIGUSR1) {
    if (setting_.link != nullptr) setting_.link->tell_user_signal();
    return pass_on(signal);
  }
  if (!is_stop_request(signal)) return;  // SIGCONT: pause() has returned, or nobody had stopped
  // A second request does not wait any longer. A hang-up is none: a terminal that goes away sends several.
  if (signal != SIGHUP) {
    if (first_request_ && Clock::now() - *first_request_ > kOneRequest) {
      killed_ = true;
      return signal_all(SIGKILL);
    }
    if (first_request_) return;
    first_request_ = Clock::now();
  }
  if (asked_to_stop_ && signal == SIGHUP) return;
  // The ranks are being ended already; they are not started again.
  if (ending_) {
    asked_to_stop_ = true;
    return;
  }
  if (setting_.link != nullptr) {
    setting_.link->tell_stop(signal);
    setting_.link->told(kTold);
  }
  stop(signal, "");
}

void Attempt::stop(int signal, const std::string& where) {
  asked_to_stop_ = true;
  if (!failures_.empty()) unsaved_ = true;
  // Those of other nodes are stopped; here there is nothing left to save.
  if (living() == 0 && failures_.empty()) saved_ = true;
  go_on();
  options_.log.info("{}{}: passed on to {} ranks, which have {} s to end", signal_name(signal), where, living(),
                    std::chrono::duration_cast<std::chrono::seconds>(*options_.stop_grace).count());
  pass_on(signal);
  wake_stopped();
  kill_at_ = Clock::now() + *options_.stop_grace;
}

// Ctrl-Z: the ranks of all nodes stop and go on with this launcher. Nobody's time runs meanwhile.
void Attempt::pause() {
  const Deadline before = Clock::now();
  for (const Rank& rank : ranks_)
    if (rank.alive && setting_.link != nullptr) held_.hold(rank.process.rank, "its launcher, which was stopped");
  held_.told(kTold);
  if (setting_.link != nullptr) setting_.link->pause(kTold);
  pausing_ = true;
  signal_all(SIGSTOP);
  setting_.signals.stop_here();
  if (setting_.link != nullptr) {
    setting_.link->resume();
    // The ranks go on with the last launcher that does.
    if (!paused_since_ && setting_.link->paused_by()) paused_since_ = before;
  }
  if (!paused_since_) signal_all(SIGCONT);
  for (const Rank& rank : ranks_)
    if (rank.alive && setting_.link != nullptr) held_.hold(rank.process.rank, "");
  reap();
  pausing_ = false;
  if (!paused_since_) postpone(Clock::now() - before);
}

// The ranks of all nodes stop and go on with any launcher that is stopped: they would wait for each other otherwise, and for
// the store, which is node 0's.
void Attempt::follow_pauses() {
  const std::optional<int> by = ending_ || asked_to_stop_ ? std::nullopt : setting_.link->paused_by();
  if (by && !paused_since_) {
    options_.log.info("the launcher of node {} was stopped: the ranks of this node wait until it goes on", *by);
    paused_since_ = Clock::now();
    signal_all(SIGSTOP);
  } else if (!by && paused_since_) {
    go_on();
    options_.log.info("all launchers run again: the ranks of this node go on");
  }
}

void Attempt::go_on() {
  if (!paused_since_) return;
  postpone(Clock::now() - *paused_since_);
  signal_all(SIGCONT);
  reap();
  paused_since_.reset();
}

// Nobody's time ran for so long.
void Attempt::postpone(std::chrono::nanoseconds time) {
  first_seen_ += time;
  if (kill_at_) *kill_at_ += time;
  for (Loss& loss : losses_) loss.at += time;
  if (told_failure_) told_failure_->at += time;
  if (told_ended_) *told_ended_ += time;
}

// Ranks that have ended but were not waited for still own their number: nobody else is hit.
void Attempt::signal_all(int signal) const {
  for (const Rank& rank : ranks_)
    if (rank.alive) kill(-rank.process.pid, signal);
}

// What asks the ranks to end in good order, where they take it so.
void Attempt::pass_on(int signal) {
  passed_on_ = signal;
  signal_all(signal);
}

// A stopped rank hears nothing until it goes on.
void Attempt::wake_stopped() const {
  for (const Rank& rank : ranks_)
    if (rank.alive && rank.stopped) kill(-rank.process.pid, SIGCONT);
}

void Attempt::reap() {
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    const auto id = static_cast<id_t>(rank.process.pid);
    siginfo_t how{};
    while (waitid(P_PID, id, &how, WSTOPPED | WCONTINUED | WNOHANG) == 0 && how.si_pid != 0) {
      rank.stopped = how.si_code == CLD_STOPPED;
      if (rank.stopped && !pausing_ && !paused_since_) note_stop(rank, how.si_status);
      how = {};
    }
    how = {};
    const int asked = waitid(P_PID, id, &how, WEXITED | WNOHANG | WNOWAIT);
    if (asked == 0 && how.si_pid == 0) continue;
    rank.alive = false;
    // What it had started goes with it. Its number, and so that of its group, is its own until it has been waited for.
    if (asked == 0) kill(-rank.process.pid, SIGKILL);
    setting_.guardian.forget(rank.process.pid);
    if (asked == 0) waitid(P_PID, id, &how, WEXITED);
    note_end(rank, how);
  }
}

void Attempt::note_stop(Rank& rank, int signal) {
  const pid_t pid = rank.process.pid;
  std::string what = "the others wait for it without limit (BONFIRE_HEARTBEAT_TIMEOUT is 0)";
  if (limits_.silent > 0)
    what = fmt::format("the others give it up after about {:g} s (BONFIRE_HEARTBEAT_TIMEOUT)", limits_.silent);
  options_.log.warning("rank {} was stopped by {}; kill -CONT {} lets it go on{}", rank.process.rank, signal_name(signal),
                       pid, options_.ranks * options_.nodes > 1 ? ", " + what : "");
}

void Attempt::note_end(Rank& rank, const siginfo_t& how) {
  const bool exited = how.si_pid != 0 && how.si_code == CLD_EXITED;
  rank.output.take(rank.process.out, rank.process.err);
  rank.output.finish();
  std::optional<FailureNote> note = read_failure_note(rank.error_file);
  if (note) rank.output.note(note->details.empty() ? note->message : note->message + "\n" + note->details);
  if (exited && how.si_status == 0) {
    done_.push_back(rank.process.rank);
    return;
  }
  if (exited && how.si_status == 3) {
    saved_ = true;
    return;
  }
  RankFailure failure;
  failure.rank = rank.process.rank;
  failure.node = options_.node;
  failure.at = now_ns();
  if (exited)
    failure.code = how.si_status;
  else if (how.si_pid != 0)
    failure.signal = how.si_status;
  else
    note = FailureNote{.message = "another part of this program has waited for it, so nobody knows how it ended"};
  failure.note = std::move(note);
  failure.last_lines.assign(rank.output.last_lines().begin(), rank.output.last_lines().end());
  failure.log_file = rank.log_file;
  if (!may_be_lost(failure)) return note_failure(std::move(failure));
  // One that has itself lost another: that may be one whose loss ends the run.
  const auto settled = is_victim(failure) ? Clock::duration(kSettleVictims) : Clock::duration(0);
  losses_.push_back({std::move(failure), Clock::now() + settled});
}

void Attempt::note_failure(RankFailure failure) {
  if (asked_to_stop_) unsaved_ = true;
  if (ending_ || asked_to_stop_) return;
  if (failures_.empty()) first_seen_ = Clock::now();
  failures_.push_back(std::move(failure));
}

// Where the run is to end, a rank comes back only to end with the others: not if these are killed.
bool Attempt::may_be_lost(const RankFailure& failure) const {
  if (!options_.lost || failure.rank < options_.lost->from || ending_ || !failures_.empty()) return false;
  if (failure.code == 2 || killed_ || (asked_to_stop_ && !kill_at_)) return false;
  if (failure.note)
    for (const auto kind : {FailureNote::Kind::configuration, FailureNote::Kind::run, FailureNote::Kind::stall})
      if (failure.note->kind == kind) return false;
  return std::filesystem::exists(loss_file(failure.rank));
}

void Attempt::settle_losses() {
  const bool ends = ending_ || !failures_.empty();
  for (const Loss& loss : std::exchange(losses_, {})) {
    if (ends)
      note_failure(loss.failure);
    else if (Clock::now() < loss.at)
      losses_.push_back(loss);
    else
      lose(loss.failure);
  }
}

void Attempt::lose(const RankFailure& failure) {
  const int local = failure.rank - options_.node * options_.ranks;
  Rank& rank = ranks_[static_cast<std::size_t>(local)];
  const int times = rank.returns + 1, most = options_.lost->most_returns, all = options_.ranks * options_.nodes;
  report_words(options_, failure);
  if (options_.lost->policy == LostRanks::Policy::drop) {
    options_.log.warning("{}; the others go on without it", cause_of(failure));
    dropped_.push_back(failure.rank);
    return held_.lost_for_good(failure.rank, times, all);
  }
  if (times > most) {
    options_.log.error("rank {} was started again {} times and is lost once more: at most {} times are allowed",
                       failure.rank, times - 1, most);
    return note_failure(failure);
  }
  options_.log.warning("{}; the others wait, and it is started again alone ({} of at most {} times)", cause_of(failure),
                       times, most);
  held_.lost(failure.rank, times);
  try {
    rank = start(local, times);
  } catch (const Error& error) {
    options_.log.error("rank {} cannot be started again: {}", failure.rank, error.what());
    return note_failure(failure);
  }
  setting_.guardian.watch(rank.process.pid);
  // The others have heard of it, and would wait for its vote.
  if (passed_on_ != 0 && options_.ranks_take_signals) kill(-rank.process.pid, passed_on_);
}

void Attempt::look_for_debuggers() {
  if (Clock::now() < looked_ + kLook || options_.ranks * options_.nodes == 1) return;
  looked_ = Clock::now();
  for (const Rank& rank : ranks_)
    if (rank.alive) held_.hold(rank.process.rank, held_by(rank.process.pid));
}

// When it is time to choose. REQUIRES: something failed.
Deadline Attempt::settled() const {
  return first_seen_ + (is_victim(first_failure(failures_)) ? Clock::duration(kSettleVictims) : kSettle);
}

void Attempt::choose_failure() {
  if (told_failure_) return;
  RankFailure first = first_failure(failures_);
  // Nobody crashed, but somebody left: those who lost it are not to blame.
  if (is_victim(first) && !done_.empty()) {
    const std::string after = fmt::format("(after rank {} had ended with exit code 0)", fmt::join(done_, ", "));
    if (first.note)
      first.note->message += " " + after;
    else
      first.note = FailureNote{.kind = FailureNote::Kind::communication, .message = after, .at = first.at};
  }
  if (setting_.link == nullptr) return end_because(first);
  setting_.link->tell(first);
  told_failure_ = {std::move(first), Clock::now()};
}

void Attempt::hear(const NodeLink::News& news) {
  if (ending_ || asked_to_stop_) return;
  if (news.failure)
    end_because(*news.failure);
  else if (news.stop_signal != 0)
    stop(news.stop_signal, fmt::format(" at the launcher of node {}", news.stop_node));
}

void Attempt::end_because(const RankFailure& failure) {
  failure_ = failure;
  ending_ = true;
  go_on();
  options_.log.error("{}{}", cause_of(failure), living() > 0 ? "; ending the other ranks" : "");
  // Nobody is asked to end in good order: there is none left. Ranks that would take SIGTERM for that hear it so.
  for (const Rank& rank : ranks_)
    if (rank.alive) StopSignals::end_now(rank.process.pid);
  signal_all(SIGTERM);
  wake_stopped();
  kill_at_ = Clock::now() + options_.grace;
}

}  // namespace bonfire
