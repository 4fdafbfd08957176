#include "bonfire/comm/join.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/base/open_files.h"
#include "bonfire/base/output_file.h"
#include "bonfire/comm/crash.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/failure.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/rendezvous.h"
#include "bonfire/comm/returned_world.h"
#include "bonfire/comm/stall.h"
#include "bonfire/comm/stop_signals.h"
#include "bonfire/comm/token_store.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string variable(const Variables& variables, const std::string& name) {
  const auto found = variables.find(name);
  return found == variables.end() ? std::string() : found->second;
}

std::chrono::milliseconds rendezvous_timeout(const JoinOptions& options) {
  const std::string text = variable(options.variables, "BONFIRE_RENDEZVOUS_TIMEOUT");
  if (text.empty()) return options.rendezvous_timeout;
  double seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds > 0) || seconds > 1e6)
    fail_config("BONFIRE_RENDEZVOUS_TIMEOUT is '{}': a number of seconds above 0 is needed", text);
  return std::chrono::milliseconds(static_cast<long>(seconds * 1000));
}

bool on_one_machine(const Environment& place) { return place.local_size == place.size; }

// The address that the user gave this machine; empty: none.
std::string own_address(const JoinOptions& options) {
  const std::string address = variable(options.variables, "BONFIRE_ADDRESS");
  if (!address.empty()) return address;
  const std::string interface = variable(options.variables, "GLOO_SOCKET_IFNAME");
  return interface.empty() ? "" : address_of_interface(interface.substr(0, interface.find(',')));
}

// The address of this machine that other ranks reach it at.
std::string gloo_address(const JoinOptions& options, const Environment& place) {
  const std::string own = own_address(options);
  if (!own.empty()) return own;
  if (on_one_machine(place) || place.address.empty()) return options.world.address;
  return address_towards(address_for_others(place.address));
}

StorePtr token_store(const Endpoint& server, const std::string& token, std::chrono::milliseconds timeout,
                     std::shared_ptr<StoreServer> host = nullptr) {
  auto client =
      std::make_shared<StoreClient>(StoreClientOptions{.server = server, .token = token, .connect_timeout = timeout});
  return c10::make_intrusive<TokenStore>(std::move(client), std::move(host));
}

StorePtr store_of(const Environment& place, const JoinOptions& options) {
  const auto timeout = rendezvous_timeout(options);
  if (place.hosted && place.source != LaunchSource::bonfire) {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<std::uint16_t>(place.port);
    tcp.timeout = timeout;
    tcp.waitWorkers = false;
    return c10::make_intrusive<c10d::TCPStore>(place.address, tcp);
  }
  Endpoint server{place.address, place.port};
  if (place.hosted) return token_store(server, place.token, timeout);

  // Rank 0 hosts: on loopback unless there are ranks elsewhere.
  if (on_one_machine(place)) server.host = "127.0.0.1";
  const std::string token = job_token(options.variables, place.run_id.empty() ? to_string(server) : place.run_id);
  if (!on_one_machine(place)) server.host = address_for_others(server.host, place.node == 0 ? own_address(options) : "");
  std::shared_ptr<StoreServer> host;
  if (place.rank == 0) {
    require_open_files(other_files + store_files(place.size), fmt::format("{} ranks, which meet at rank 0,", place.size));
    host = std::make_shared<StoreServer>(StoreServerOptions{.listen = server,
                                                            .token = token,
                                                            .drain = 30s,
                                                            .silence = StallLimits::from(options.variables).silence(),
                                                            .log = options.world.log});
  }
  try {
    return token_store(server, token, timeout, std::move(host));
  } catch (const Error& error) {
    fail("missing rank 0, which listens at {}: {}", to_string(server), error.what());
  }
}

void call_off(c10d::Store& store) {
  try {
    call_off_check_in(store);
  } catch (const std::exception&) {
    // The store is gone, and the run with it: others say so.
  }
}

// A rank that lost another one: where the failure shows, not where it began.
bool is_communication_failure(const std::exception& error) {
  return dynamic_cast<const PeerLost*>(&error) != nullptr || dynamic_cast<const c10::DistError*>(&error) != nullptr;
}

FailureNote::Kind kind_of(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error) != nullptr) return FailureNote::Kind::configuration;
  if (dynamic_cast<const RunOver*>(&error) != nullptr) return FailureNote::Kind::run;
  return is_communication_failure(error) ? FailureNote::Kind::communication : FailureNote::Kind::exception;
}

// LibTorch's exceptions carry a stack below their first line: that is for the log.
FailureNote note_of(const std::exception& error) {
  const std::string text = error.what();
  const auto end = text.find('\n');
  return {.kind = kind_of(error),
          .message = text.substr(0, end),
          .details = end == std::string::npos ? "" : text.substr(end + 1)};
}

// Who is told why this rank failed.
struct Reports {
  std::string error_file;    // empty: nobody
  bool to_launcher = false;  // ours, which says it once for all ranks
  std::function<void()> first = {};
};

Reports reports_to(const JoinOptions& options, const std::string& error_file) {
  return {error_file, !error_file.empty() && !variable(options.variables, "BONFIRE_LAUNCHER").empty(), options.on_failure};
}

[[noreturn]] void leave(const Reports& reports, FailureNote note) {
  note.at = now_ns();
  if (reports.first) reports.first();
  const bool told = !reports.error_file.empty() && write_failure_note(reports.error_file, note);
  std::fflush(stdout);
  if (!told || !reports.to_launcher) std::fprintf(stderr, "bonfire: %s\n", note.message.c_str());
  std::fflush(nullptr);
  std::_Exit(note.kind == FailureNote::Kind::configuration ? 2 : 1);
}

// While it lives, an exception that nobody catches leaves its words for the launcher before it ends the process: NCCL's
// watchdog throws one on a thread of its own when it has lost another rank, which is then not this one's failure.
class LastException {
 public:
  explicit LastException(const std::string& error_file) : before_(std::set_terminate(note_and_end)) { file() = error_file; }
  ~LastException() { std::set_terminate(before_); }
  LastException(const LastException&) = delete;
  LastException& operator=(const LastException&) = delete;

 private:
  // A handler can be given nothing: what it needs must be where it can find it.
  static std::string& file() {
    static std::string name;
    return name;
  }
  [[noreturn]] static void note_and_end() {
    try {
      if (std::current_exception()) throw;
    } catch (const std::exception& error) {
      FailureNote note = note_of(error);
      note.at = now_ns();
      if (!file().empty()) write_failure_note(file(), note);
      std::fprintf(stderr, "bonfire: a thread ended with: %s\n", note.message.c_str());
    } catch (...) {
    }
    std::abort();
  }

  std::terminate_handler before_;
};

}  // namespace

c10::Device local_device(const Environment& place, const Log& log) {
  const c10::Device device = device_in_turn(cuda_plugin(), place.local_rank, log);
  set_current(device);
  return device;
}

World world_from_store(StorePtr store, const Environment& place, JoinOptions options) {
  StorePtr own = c10::make_intrusive<c10d::PrefixStore>(fmt::format("attempt {}", place.restarts), std::move(store));
  const int returns = returns_of(options.variables);
  const CheckIn self{.rank = place.rank,
                     .size = place.size,
                     .configuration = options.configuration,
                     .timeout = rendezvous_timeout(options),
                     .log = options.world.log};
  if (returns > 0) {
    check_in_again(*own, self);
  } else if (place.size > 1) {
    if (options.stop) options.stop->answer_with([store = own->clone()] { call_off(*store); });
    check_in(*own, self);
  }
  if (options.stop) options.stop->answer_with({});
  WorldOptions world = options.world;
  world.local_rank = place.local_rank;
  world.local_size = place.local_size;
  world.node = place.node;
  world.address = gloo_address(options, place);
  if (options.device) world.device = options.device(place);
  World joined = returns > 0 ? returned_world(own, place.rank, place.size, world)
                             : World::from_store(own, place.rank, place.size, world);
  if (returns > 0) own->set(returned_key(place.rank), lost_text(returns, false));
  const StallLimits limits = StallLimits::from(options.variables);
  if (place.size > 1 && (limits.silent > 0 || limits.behind > 0))
    joined.keep(std::make_shared<Watchdog>(
        own, joined.progress(),
        WatchdogOptions{
            .rank = place.rank, .size = place.size, .limits = limits, .on_stall = options.on_stall, .log = world.log}));
  return joined;
}

void may_be_lost(const Variables& variables) {
  if (const std::string file = variable(variables, "BONFIRE_MAY_BE_LOST_FILE"); !file.empty())
    write_file(file, "", Survives::process);
}

int returns_of(const Variables& variables) {
  const std::string text = variable(variables, "BONFIRE_RETURNS");
  return text.empty() ? 0 : std::stoi(text);
}

World world_from_environment(JoinOptions options) {
  const Environment place = resolve_environment(options.variables);
  if (place.launches_itself)
    fail_config("{} starts one process a node, which must start its own ranks: use bonfire::launch, or bonfire launch",
                name_of(place.source));
  StorePtr store = place.size == 1 ? StorePtr(c10::make_intrusive<c10d::HashStore>()) : store_of(place, options);
  return world_from_store(std::move(store), place, std::move(options));
}

MeetingPlace::MeetingPlace(const std::string& address, Log log)
    : token_(random_token()),
      server_(std::make_shared<StoreServer>(
          StoreServerOptions{.listen = {address, 0}, .token = token_, .drain = 30s, .log = std::move(log)})) {}

std::string MeetingPlace::invitation() const { return to_string(server_->endpoint()) + " " + token_; }

World world_from_invitation(const std::string& invitation, const Environment& place, JoinOptions options,
                            MeetingPlace* host) {
  const std::size_t space = invitation.find(' ');
  require(space != std::string::npos, "'{}' is not an invitation", invitation);
  const Endpoint server = parse_endpoint(invitation.substr(0, space));
  Environment known = place;
  known.address = server.host;
  known.port = server.port;
  StorePtr store = token_store(server, invitation.substr(space + 1), rendezvous_timeout(options),
                               host != nullptr ? host->server_ : nullptr);
  return world_from_store(std::move(store), known, std::move(options));
}

int run_rank(JoinOptions options, const std::function<int(World&)>& program) {
  Reports reports = reports_to(options, variable(options.variables, "BONFIRE_ERROR_FILE"));
  try {
    const Environment place = resolve_environment(options.variables);
    reports = reports_to(options, place.error_file);
    // Whoever reads a pipe gets lines as they are printed, as a terminal does.
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    raise_open_files();
    const CrashReport crash_report(place.rank);
    const LastException last_exception(place.error_file);
    if (!options.on_stall)
      options.on_stall = [reports](const std::string& verdict) {
        leave(reports, {.kind = FailureNote::Kind::stall, .message = verdict});
      };
    const StallLimits limits = StallLimits::from(options.variables);
    const bool losable = !variable(options.variables, "BONFIRE_MAY_BE_LOST_FILE").empty();
    World world = world_from_environment(std::move(options));
    try {
      const int code = program(world);
      // A rank that is done says so and stays until all are: the watchdog can then tell who did less than the others.
      world.progress()->finish();
      if (world.size() > 1 && limits.silent > 0 && limits.behind > 0)
        losable ? check_out_once(world.store(), world.rank(), world.size()) : check_out(world.store(), world.size());
      return code;
    } catch (const std::exception& error) {
      // Here, while the World still stands: taking it down could wait for ranks that are gone.
      leave(reports, note_of(error));
    } catch (...) {
      leave(reports, {.message = "an exception that is no std::exception"});
    }
  } catch (const StoppedOnRequest&) {
    return 3;
  } catch (const std::exception& error) {
    leave(reports, note_of(error));
  }
}

}  // namespace bonfire
