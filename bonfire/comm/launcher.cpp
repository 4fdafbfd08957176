#include "bonfire/comm/launcher.h"

#include <poll.h>

#include <charconv>
#include <cstdlib>
#include <memory>

#include "bonfire/base/open_files.h"
#include "bonfire/base/system_error.h"
#include "bonfire/comm/attempt.h"
#include "bonfire/comm/descriptors.h"
#include "bonfire/comm/guardian.h"
#include "bonfire/comm/node_link.h"
#include "bonfire/comm/signal_events.h"
#include "bonfire/comm/stall.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/terminal.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;

// How long the other nodes have to hear that this one does not start again, or is stopped.
constexpr auto kTellOthers = 2s;

// A limit in seconds that the user may set.
std::chrono::milliseconds limit_of(const LauncherOptions& options, const char* name, std::chrono::seconds usual) {
  const Variables variables = rank_variables(options);
  const auto found = variables.find(name);
  if (found == variables.end() || found->second.empty()) return usual;
  const std::string& text = found->second;
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds <= 1e6))
    fail_config("{} is '{}': a number of seconds from 0 to 1000000 is needed", name, text);
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

// What was not set comes from the environment.
void fill_in_limits(LauncherOptions& options) {
  if (!options.stop_grace) options.stop_grace = limit_of(options, "BONFIRE_STOP_TIMEOUT", 60s);
  if (!options.reader_patience) options.reader_patience = limit_of(options, "BONFIRE_READER_TIMEOUT", 30s);
}

// Where the ranks' output goes. A temporary one is removed unless somebody may want to read it.
class LogFolder {
 public:
  explicit LogFolder(const std::filesystem::path& given) : path_(given), temporary_(given.empty()) {
    if (temporary_) {
      const std::filesystem::path parent = std::filesystem::temp_directory_path();
      std::string name = (parent / "bonfire-XXXXXX").string();
      require_system(mkdtemp(name.data()) != nullptr, "cannot make a folder for the ranks' output in '{}'", parent.string());
      path_ = name;
    }
    std::error_code error;
    std::filesystem::create_directories(path_, error);
    if (error) fail("cannot make the folder '{}' for the ranks' output: {}", path_.string(), error.message());
  }
  ~LogFolder() {
    std::error_code ignored;
    if (temporary_ && !kept_) std::filesystem::remove_all(path_, ignored);
  }
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void keep() { kept_ = true; }

 private:
  std::filesystem::path path_;
  bool temporary_;
  bool kept_ = false;
};

void check_values(const LauncherOptions& options) {
  if (options.program.empty() || options.program.front().empty()) fail_config("no program to launch was given");
  if (options.ranks < 1) fail_config("{} ranks: at least 1 is needed", options.ranks);
  // As many as the guardian can watch.
  if (options.ranks > Guardian::kMost)
    fail_config("{} ranks on one node: at most {} are allowed", options.ranks, Guardian::kMost);
  if (options.nodes < 1) fail_config("{} nodes: at least 1 is needed", options.nodes);
  if (options.node < 0 || options.node >= options.nodes)
    fail_config("node rank {} of {} nodes: from 0 to {} is allowed", options.node, options.nodes, options.nodes - 1);
  if (options.nodes > 1 && options.master.port == 0)
    fail_config("several nodes need --master HOST:PORT, where node 0 listens");
  const int all = options.ranks * options.nodes;
  if (options.lost && (options.lost->from < 1 || options.lost->from >= all))
    fail_config("ranks from {} on may be lost, of {}: from 1 to {} is allowed", options.lost->from, all, all - 1);
  if (options.lost && options.lost->most_returns < 0)
    fail_config("{} returns of a lost rank: at least 0 is needed", options.lost->most_returns);
  if (options.max_restarts < 0) fail_config("{} restarts: at least 0 is needed", options.max_restarts);
  LauncherOptions limits = options;
  fill_in_limits(limits);
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

// What the launcher of one node holds open for its ranks: pipes, a log, a handle of the process, and on node 0 the store's
// connections of all nodes.
long files_of(const LauncherOptions& options) {
  return other_files + 4L * options.ranks + (options.node == 0 ? store_files(1L * options.ranks * options.nodes) : 0);
}

// How long the store may be silent: as long as a rank may be.
std::chrono::milliseconds answer_timeout(const StallLimits& limits) {
  return limits.silence().count() > 0 ? limits.silence() : std::chrono::hours(24);
}

// Ctrl-Z where no ranks are left to stop with this launcher.
void stop_here(const SignalEvents& signals, NodeLink* link) {
  if (link != nullptr) link->pause(kTellOthers);
  signals.stop_here();
  if (link != nullptr) link->resume();
}

// Between two attempts: whether all nodes are there for the next one. Requests to stop are heard meanwhile, and the run ends
// with what it has come to; SIGUSR1 is for the ranks that follow.
bool may_start_again(const LauncherOptions& options, bool asked, const SignalEvents& signals, NodeLink* link) {
  const auto patience = options.grace + 35s;
  Deadline until = deadline_in(patience);
  if (link != nullptr && !asked) link->ready(options.grace + 30s);
  bool user_signal = false;
  while (true) {
    while (const int signal = signals.next()) {
      asked = asked || is_stop_request(signal);
      user_signal = user_signal || signal == SIGUSR1;
      if (signal == SIGTSTP) stop_here(signals, link);
    }
    // Nobody's time runs while a launcher is stopped.
    if (link != nullptr && link->paused_by()) until = deadline_in(patience);
    if (asked) {
      options.log.info("the ranks are not started again: the run was asked to stop");
      if (link != nullptr) {
        link->not_again();
        link->told(kTellOthers);
      }
      return false;
    }
    const std::optional<bool> all = link == nullptr ? true : link->all_ready();
    if (all == true) break;
    if (all == false || std::chrono::steady_clock::now() >= until) {
      options.log.error("not all nodes are there for another attempt");
      return false;
    }
    pollfd entries[] = {{signals.fd(), POLLIN, 0}, {link->readable(), POLLIN, 0}};
    poll(entries, 2, 1000);
    link->take_user_signal();  // one of the attempt that has ended; it makes `readable` wait for more
  }
  if (user_signal) signals.put_back(SIGUSR1);
  return true;
}

// All attempts. `options.log` keeps nobody waiting.
LaunchOutcome attempt_all(const LauncherOptions& options, const std::filesystem::path& folder, SignalEvents& signals,
                          Terminal& terminal) {
  const StallLimits limits = StallLimits::from(rank_variables(options));
  Guardian guardian;
  std::unique_ptr<StoreServer> server;
  Endpoint store = options.master;
  if (options.node == 0) {
    server = std::make_unique<StoreServer>(StoreServerOptions{.listen = options.master,
                                                              .token = options.token,
                                                              .drain = options.nodes > 1 ? 5s : 0s,
                                                              .silence = limits.silence(),
                                                              .log = options.log});
    store = server->endpoint();
  }

  LaunchOutcome outcome;
  outcome.log_folder = folder;
  for (int number = 0;; ++number) {
    outcome.restarts = number;
    std::unique_ptr<NodeLink> link;
    if (options.nodes > 1)
      link = std::make_unique<NodeLink>(
          NodeLink::Options{.node = options.node,
                            .nodes = options.nodes,
                            .attempt = number,
                            .store = {.server = store, .token = options.token, .answer_timeout = answer_timeout(limits)}});
    Attempt attempt(options, {number, folder, store, link.get(), signals, guardian, terminal});
    const Attempt::Ending ending = attempt.run();
    outcome.failure = attempt.failure();
    outcome.dropped = attempt.dropped();
    if (ending == Attempt::Ending::well) return outcome;
    if (ending == Attempt::Ending::on_request) {
      outcome.exit_code = attempt.saved() ? 3 : 1;
      return outcome;
    }
    report_words(options, *outcome.failure);
    outcome.exit_code = worth_a_restart(*outcome.failure) ? 1 : 2;
    if (number == options.max_restarts || outcome.exit_code == 2) return outcome;
    if (!may_start_again(options, attempt.asked_to_stop(), signals, link.get())) return outcome;
    outcome.exit_code = 0;
    options.log.warning("starting all ranks again, restart {} of {}", number + 1, options.max_restarts);
  }
}

}  // namespace

const char* name_of(LostRanks::Policy policy) { return policy == LostRanks::Policy::drop ? "drop" : "wait"; }

void check_launch(const LauncherOptions& options) {
  check_values(options);
  require_open_files(files_of(options), fmt::format("{} ranks", options.ranks * options.nodes));
}

LaunchOutcome launch_ranks(LauncherOptions options) {
  check_launch(options);
  keep_standard_streams();
  if (options.token.empty())
    options.token = options.nodes == 1 ? random_token() : job_token(process_variables(), to_string(options.master));
  if (!options.address.empty()) options.address = bindable(options.address);
  if (options.nodes > 1)
    options.master.host = address_for_others(options.master.host, options.node == 0 ? options.address : "");

  fill_in_limits(options);

  // First: whoever asks this process to stop from here on leaves no folder behind that nobody has heard of.
  SignalEvents signals;
  if (options.prepare) options.prepare(options);
  LogFolder folder(options.log_folder);
  Terminal terminal(folder.path().string());
  options.log = terminal.relay(std::move(options.log));
  // Words wait for their reader, but not for ever, and not where somebody asks for the end.
  const auto drain = [&] {
    terminal.drain(*options.reader_patience, [&] {
      bool asked = false;
      while (const int signal = signals.next()) asked = asked || is_stop_request(signal);
      return asked;
    });
  };
  try {
    LaunchOutcome outcome = attempt_all(options, folder.path(), signals, terminal);
    if (outcome.exit_code != 0) {
      folder.keep();
      options.log.info("the ranks' output is in {}", folder.path().string());
    }
    drain();
    outcome.stdout_error = terminal.stdout_error();
    return outcome;
  } catch (...) {
    drain();
    throw;
  }
}

}  // namespace bonfire
