#include "bonfire/comm/launcher.h"

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

void check(const LauncherOptions& options) {
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

// What the launcher of one node holds open for its ranks: pipes, a log, a handle of the process, and on node 0 the store's
// connections of all nodes.
long open_files(const LauncherOptions& options) {
  return 64 + 4L * options.ranks + (options.node == 0 ? 4L * options.ranks * options.nodes : 0);
}

// How long the store may be silent: as long as a rank may be.
std::chrono::milliseconds answer_timeout(const Variables& variables) {
  const double silent = StallLimits::from(variables).silent;
  return silent > 0 ? std::chrono::milliseconds(static_cast<std::int64_t>(silent * 1e3)) : std::chrono::hours(24);
}

bool shown_as_it_is(const LauncherOptions& options, int rank) { return options.echo == Echo::first && rank == 0; }

void report(const LauncherOptions& options, const RankFailure& failure) {
  // What a person has read already is not said again.
  if (!shown_as_it_is(options, failure.rank)) {
    if (const std::string words = last_words_of(failure); !words.empty()) options.log.error("{}", words);
  }
  if (failure.note && !failure.note->details.empty()) options.log.error("more about it is in {}", failure.log_file);
}

// All attempts. `options.log` keeps nobody waiting.
LaunchOutcome attempt_all(const LauncherOptions& options, const std::filesystem::path& folder, SignalEvents& signals,
                          Terminal& terminal) {
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
    client = std::make_unique<StoreClient>(StoreClientOptions{
        .server = store, .token = options.token, .answer_timeout = answer_timeout(rank_variables(options))});

  LaunchOutcome outcome;
  outcome.log_folder = folder;
  for (int number = 0;; ++number) {
    outcome.restarts = number;
    std::unique_ptr<NodeLink> link;
    if (client) link = std::make_unique<NodeLink>(*client, NodeLink::Options{options.node, options.nodes, number});
    Attempt attempt(options, {number, folder, store, link.get(), signals, guardian, terminal});
    const Attempt::Ending ending = attempt.run();
    outcome.failure = attempt.failure();
    if (ending == Attempt::Ending::well) return outcome;
    if (ending == Attempt::Ending::on_request) {
      outcome.exit_code = attempt.saved() ? 3 : 1;
      return outcome;
    }
    report(options, *outcome.failure);
    outcome.exit_code = worth_a_restart(*outcome.failure) ? 1 : 2;
    if (number == options.max_restarts || outcome.exit_code == 2) return outcome;
    if (link && !link->ready_again(options.grace + 30s)) {
      options.log.error("not all nodes are there for another attempt");
      return outcome;
    }
    outcome.exit_code = 0;
    options.log.warning("starting all ranks again, restart {} of {}", number + 1, options.max_restarts);
  }
}

}  // namespace

LaunchOutcome launch_ranks(LauncherOptions options) {
  check(options);
  keep_standard_streams();
  require_open_files(open_files(options), fmt::format("{} ranks", options.ranks * options.nodes));
  if (options.token.empty())
    options.token = options.nodes == 1 ? random_token() : job_token(process_variables(), to_string(options.master));
  if (!options.address.empty()) options.address = bindable(options.address);
  if (options.nodes > 1)
    options.master.host = address_for_others(options.master.host, options.node == 0 ? options.address : "");

  LogFolder folder(options.log_folder);
  SignalEvents signals;
  Terminal terminal(folder.path().string());
  options.log = terminal.relay(std::move(options.log));
  // Words wait for their reader, but not for ever, and not where somebody asks for the end.
  const auto drain = [&] {
    terminal.drain(options.reader_patience, [&] {
      bool asked = false;
      while (const int signal = signals.next()) asked = asked || signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
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
