#include "bonfire/comm/launcher.h"

#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include <fmt/ranges.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/node_link.h"
#include "bonfire/comm/rank_process.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/wait_policy.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// After the first sign of trouble: how long to collect what else fails, before choosing which one was first.
constexpr auto kSettle = 200ms;
// The same where all that failed had only lost another rank: that one has yet to end, or is on another node.
constexpr auto kSettleVictims = 2s;

// Signals as events of the poll loop, for as long as it lives.
class SignalEvents {
 public:
  SignalEvents() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&wanted, signal);
    pthread_sigmask(SIG_BLOCK, &wanted, &before_);
    fd_ = Socket(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~SignalEvents() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalEvents(const SignalEvents&) = delete;
  SignalEvents& operator=(const SignalEvents&) = delete;

  int fd() const { return fd_.fd(); }
  // The next one that is pending; 0: none.
  int next() const {
    signalfd_siginfo info;
    return read(fd_.fd(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_;
  Socket fd_;
};

struct Rank {
  RankProcess process;
  RankOutput output;
  std::string log_file;
  std::string error_file;
  bool alive = true;
  bool stopped = false;  // by SIGSTOP
};

enum class Ending { well, failed, on_request };

bool shown_as_it_is(const LauncherOptions& options, int rank) { return options.echo == Echo::first && rank == 0; }

// The ranks of this node, once from start to end.
class Attempt {
 public:
  Attempt(const LauncherOptions& options, int number, const std::filesystem::path& folder, const Endpoint& store)
      : options_(options), number_(number), folder_(folder), store_(store) {}

  // `link`: null on a single node.
  Ending run(NodeLink* link, SignalEvents& signals, Guardian& guardian) {
    start(guardian);
    while (true) {
      wait_for_events(link, signals);
      for (Rank& rank : ranks_) rank.output.take_all(rank.process);
      while (const int signal = signals.next()) handle(signal);
      reap(guardian);
      if (link != nullptr && !ending_) look_at_other_nodes(*link);
      if (!ending_ && !failures_.empty() && Clock::now() >= settled()) choose_failure(link);
      if (kill_at_ && Clock::now() >= *kill_at_) {
        signal_all(SIGKILL);
        kill_at_.reset();
      }
      if (living() > 0) continue;
      if (!ending_ && !failures_.empty()) choose_failure(link);
      if (ending_ || asked_to_stop_ || link == nullptr) break;
      if (!told_ended_) link->ended();
      told_ended_ = true;
      if (link->over()) break;
    }
    finish_output();
    if (failure_) return Ending::failed;
    return asked_to_stop_ || saved_ ? Ending::on_request : Ending::well;
  }

  const std::optional<RankFailure>& failure() const { return failure_; }
  // All ranks that ended on request had saved before.
  bool saved() const { return saved_ && !unsaved_; }

 private:
  void start(Guardian& guardian) {
    for (int local = 0; local < options_.ranks; ++local) {
      const int number = options_.node * options_.ranks + local;
      const std::string log_file = (folder_ / fmt::format("rank-{}.log", number)).string();
      const std::string error_file = (folder_ / fmt::format("rank-{}.error", number)).string();
      std::filesystem::remove(error_file);
      const bool echo = options_.echo == Echo::all || shown_as_it_is(options_, number);
      RankOutput output({.file = log_file,
                         .prefix = fmt::format("[rank {}] ", number),
                         .echo = echo,
                         .raw = options_.echo == Echo::first});
      RankProcess process;
      try {
        process = start_rank(number, options_.program, variables_of(local, number, error_file));
      } catch (const Error&) {
        signal_all(SIGKILL);
        for (const Rank& rank : ranks_) waitpid(rank.process.pid, nullptr, 0);
        throw;
      }
      guardian.watch(process.pid);
      ranks_.push_back({std::move(process), std::move(output), log_file, error_file});
    }
  }

  Variables variables_of(int local, int number, const std::string& error_file) const {
    Variables variables = process_variables();
    // These would make a rank believe in a torchrun agent around the launcher.
    for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}) variables.erase(name);
    for (const auto& [name, value] : options_.variables) variables[name] = value;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    if (variables["OMP_NUM_THREADS"].empty())
      variables["OMP_NUM_THREADS"] = std::to_string(threads_per_rank(variables, options_.ranks, cores));
    wait_passively(variables);
    variables["RANK"] = std::to_string(number);
    variables["WORLD_SIZE"] = std::to_string(options_.ranks * options_.nodes);
    variables["LOCAL_RANK"] = std::to_string(local);
    variables["LOCAL_WORLD_SIZE"] = std::to_string(options_.ranks);
    variables["GROUP_RANK"] = std::to_string(options_.node);
    variables["MASTER_ADDR"] = store_.host;
    variables["MASTER_PORT"] = std::to_string(store_.port);
    if (!options_.address.empty()) variables["BONFIRE_ADDRESS"] = options_.address;
    variables["TORCHELASTIC_RESTART_COUNT"] = std::to_string(number_);
    variables["TORCHELASTIC_RUN_ID"] = to_string(store_);
    variables.insert_or_assign("BONFIRE_LAUNCHER", std::string(1, '1'));
    variables["BONFIRE_TOKEN"] = options_.token;
    variables["BONFIRE_ERROR_FILE"] = error_file;
    return variables;
  }

  int living() const {
    return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; }));
  }

  void wait_for_events(NodeLink* link, const SignalEvents& signals) {
    std::vector<pollfd> entries = {{signals.fd(), POLLIN, 0}};
    for (const Rank& rank : ranks_)
      for (const Socket* pipe : {&rank.process.out, &rank.process.err})
        if (*pipe) entries.push_back({pipe->fd(), POLLIN, 0});
    const bool listening = link != nullptr && !ending_ && !link->failure() && !link->over();
    if (listening) entries.push_back({link->news(), POLLIN, 0});
    Deadline next = Clock::now() + 1h;
    if (!failures_.empty() && !ending_) next = std::min(next, settled());
    if (kill_at_) next = std::min(next, *kill_at_);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    poll(entries.data(), entries.size(), static_cast<int>(std::clamp<long long>(left, 0, 1 << 30)));
  }

  void handle(int signal) {
    if (signal == SIGCHLD) return;  // reap() looks
    if (signal == SIGUSR1) return signal_all(signal);
    // A second request does not wait any longer.
    if (asked_to_stop_) return signal_all(SIGKILL);
    asked_to_stop_ = true;
    options_.log.info("{}: passed on to {} ranks, which have {} s to end", signal_name(signal), living(),
                      std::chrono::duration_cast<std::chrono::seconds>(options_.stop_grace).count());
    signal_all(signal);
    wake_stopped();
    kill_at_ = Clock::now() + options_.stop_grace;
  }

  void signal_all(int signal) const {
    for (const Rank& rank : ranks_)
      if (rank.alive) kill(-rank.process.pid, signal);
  }

  // A stopped rank hears nothing until it goes on.
  void wake_stopped() const {
    for (const Rank& rank : ranks_)
      if (rank.alive && rank.stopped) kill(-rank.process.pid, SIGCONT);
  }

  void reap(Guardian& guardian) {
    for (Rank& rank : ranks_) {
      int status = 0;
      while (rank.alive && waitpid(rank.process.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == rank.process.pid) {
        if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
          rank.stopped = WIFSTOPPED(status);
          if (rank.stopped)
            options_.log.warning("rank {} was stopped by {}", rank.process.rank, signal_name(WSTOPSIG(status)));
          continue;
        }
        rank.alive = false;
        // What it had started goes with it. The group exists as long as one of its members does.
        kill(-rank.process.pid, SIGKILL);
        guardian.forget(rank.process.pid);
        note_end(rank, status);
      }
    }
  }

  void note_end(Rank& rank, int status) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
      done_.push_back(rank.process.rank);
      return;
    }
    const bool stopped_and_saved = WIFEXITED(status) && WEXITSTATUS(status) == 3;
    if (stopped_and_saved) saved_ = true;
    if (asked_to_stop_ && !stopped_and_saved) unsaved_ = true;
    if (stopped_and_saved || ending_ || asked_to_stop_) return;
    rank.output.take_all(rank.process);
    RankFailure failure;
    failure.rank = rank.process.rank;
    failure.node = options_.node;
    failure.at = now_ns();
    if (WIFSIGNALED(status))
      failure.signal = WTERMSIG(status);
    else
      failure.code = WEXITSTATUS(status);
    failure.note = read_failure_note(rank.error_file);
    if (failure.note && !failure.note->details.empty()) rank.output.note(failure.note->details);
    failure.last_lines.assign(rank.output.last_lines().begin(), rank.output.last_lines().end());
    failure.log_file = rank.log_file;
    if (failures_.empty()) first_seen_ = Clock::now();
    failures_.push_back(std::move(failure));
  }

  // When it is time to choose. REQUIRES: something failed.
  Deadline settled() const {
    return first_seen_ + (is_victim(first_failure(failures_)) ? Clock::duration(kSettleVictims) : kSettle);
  }

  void choose_failure(NodeLink* link) {
    RankFailure first = first_failure(failures_);
    // Nobody crashed, but somebody left: those who lost it are not to blame.
    if (is_victim(first) && !done_.empty())
      first.note->message += fmt::format(" (after rank {} had ended with exit code 0)", fmt::join(done_, ", "));
    if (link != nullptr) first = link->tell(first);
    end_because(first);
  }

  void look_at_other_nodes(NodeLink& link) {
    if (const std::optional<RankFailure> failure = link.failure()) end_because(*failure);
  }

  void end_because(const RankFailure& failure) {
    failure_ = failure;
    ending_ = true;
    options_.log.error("{}{}", cause_of(failure), living() > 0 ? "; ending the other ranks" : "");
    signal_all(SIGTERM);
    wake_stopped();
    kill_at_ = Clock::now() + options_.grace;
  }

  void finish_output() {
    for (Rank& rank : ranks_) {
      rank.output.take_all(rank.process);
      rank.output.finish();
    }
  }

  const LauncherOptions& options_;
  const int number_;
  const std::filesystem::path& folder_;
  const Endpoint& store_;
  std::vector<Rank> ranks_;
  std::vector<RankFailure> failures_;
  std::vector<int> done_;  // ended well
  std::optional<RankFailure> failure_;
  Deadline first_seen_{};  // the first of failures_
  std::optional<Deadline> kill_at_;
  bool ending_ = false;  // because of a failure
  bool asked_to_stop_ = false;
  bool saved_ = false;    // a rank ended with code 3
  bool unsaved_ = false;  // a rank was asked to end and did so without saving
  bool told_ended_ = false;
};

std::filesystem::path temporary_folder() {
  std::string name = (std::filesystem::temp_directory_path() / "bonfire-XXXXXX").string();
  require(mkdtemp(name.data()) != nullptr, "cannot make a folder for the ranks' output in '{}': {}",
          std::filesystem::temp_directory_path().string(), std::strerror(errno));
  return name;
}

void check(const LauncherOptions& options) {
  if (options.program.empty() || options.program.front().empty()) fail_config("no program to launch was given");
  if (options.ranks < 1) fail_config("{} ranks: at least 1 is needed", options.ranks);
  // As many as the guardian can watch.
  if (options.ranks > 4096) fail_config("{} ranks on one node: at most 4096 are allowed", options.ranks);
  if (options.nodes < 1) fail_config("{} nodes: at least 1 is needed", options.nodes);
  if (options.node < 0 || options.node >= options.nodes)
    fail_config("node rank {} of {} nodes: from 0 to {} is allowed", options.node, options.nodes, options.nodes - 1);
  if (options.nodes > 1 && options.master.port == 0)
    fail_config("several nodes need --master HOST:PORT, where node 0 listens");
  if (options.max_restarts < 0) fail_config("{} restarts: at least 0 is needed", options.max_restarts);
}

// The numeric form. Throws ConfigError where the address is not one of this machine.
std::string bindable(const std::string& address) {
  try {
    return endpoint_of(listen_on({address, 0})).host;
  } catch (const Error& error) {
    fail_config("address '{}' is not one of this machine: {}", address, error.what());
  }
}

// Whether starting again could help: a configuration that was refused will be refused again.
bool worth_a_restart(const RankFailure& failure) {
  return failure.code != 2 && !(failure.note && failure.note->kind == FailureNote::Kind::configuration);
}

}  // namespace

LaunchOutcome launch_ranks(LauncherOptions options) {
  check(options);
  if (options.token.empty())
    options.token = options.nodes == 1 ? random_token() : job_token(process_variables(), to_string(options.master));
  if (!options.address.empty()) options.address = bindable(options.address);
  if (options.nodes > 1)
    options.master.host = address_for_others(options.master.host, options.node == 0 ? options.address : "");
  // Before any thread is there: the guardian must hold nothing but its pipe, and signals must be blocked in all threads.
  SignalEvents signals;
  Guardian guardian;
  std::unique_ptr<StoreServer> server;
  Endpoint store = options.master;
  if (options.node == 0) {
    server = std::make_unique<StoreServer>(StoreServerOptions{
        .listen = options.master, .token = options.token, .drain = options.nodes > 1 ? 5s : 0s, .log = options.log});
    store = server->endpoint();
  }
  std::unique_ptr<StoreClient> client;
  if (options.nodes > 1)
    client =
        std::make_unique<StoreClient>(StoreClientOptions{.server = store, .token = options.token, .answer_timeout = 5s});

  const bool temporary = options.log_folder.empty();
  LaunchOutcome outcome;
  outcome.log_folder = temporary ? temporary_folder() : options.log_folder;
  std::filesystem::create_directories(outcome.log_folder);

  for (int number = 0;; ++number) {
    outcome.restarts = number;
    std::unique_ptr<NodeLink> link;
    if (client) link = std::make_unique<NodeLink>(*client, NodeLink::Options{options.node, options.nodes, number});
    Attempt attempt(options, number, outcome.log_folder, store);
    const Ending ending = attempt.run(link.get(), signals, guardian);
    outcome.failure = attempt.failure();
    if (ending == Ending::well) break;
    if (ending == Ending::on_request) {
      outcome.exit_code = attempt.saved() ? 3 : 1;
      break;
    }
    // What a person has read already is not said again.
    if (!shown_as_it_is(options, outcome.failure->rank)) {
      if (const std::string words = last_words_of(*outcome.failure); !words.empty()) options.log.error("{}", words);
    }
    if (outcome.failure->note && !outcome.failure->note->details.empty())
      options.log.error("more about it is in {}", outcome.failure->log_file);
    outcome.exit_code = worth_a_restart(*outcome.failure) ? 1 : 2;
    if (number == options.max_restarts || outcome.exit_code == 2) break;
    if (link && !link->ready_again(options.grace + 30s)) {
      options.log.error("not all nodes are there for another attempt");
      break;
    }
    outcome.exit_code = 0;
    options.log.warning("starting all ranks again, restart {} of {}", number + 1, options.max_restarts);
  }
  if (temporary && outcome.exit_code == 0) std::filesystem::remove_all(outcome.log_folder);
  return outcome;
}

}  // namespace bonfire
