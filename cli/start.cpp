#include "cli/start.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/random.h"
#include "bonfire/base/system_error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/environment.h"
#include "bonfire/comm/hear.h"
#include "bonfire/comm/join.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/secret.h"
#include "bonfire/comm/stop_signals.h"
#include "bonfire/comm/stop_vote.h"
#include "bonfire/comm/wait_policy.h"
#include "bonfire/train/build.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/run_folder.h"
#include "bonfire/train/weights.h"
#include "cli/commands.h"
#include "cli/grace.h"
#include "cli/last_words.h"
#include "cli/requests.h"

namespace bonfire::cli {
namespace {

namespace fs = std::filesystem;

// How a command tells the ranks that it starts where the run's folder is, and by that, that everything has been checked.
constexpr const char* folder_variable = "BONFIRE_RUN_FOLDER";
// The same where several nodes have launchers, whose ranks agree on one folder: where the first rank of each node says
// which.
constexpr const char* folder_file_variable = "BONFIRE_RUN_FOLDER_FILE";
// How a command tells the ranks that it starts on several nodes, time and again, which launch they are of.
constexpr const char* launch_variable = "BONFIRE_LAUNCH";
// The terminal on which the ranks' words end, whose width they ask for; their own stderr is a pipe.
constexpr const char* terminal_variable = "BONFIRE_TERMINAL";

// Empty: there is none.
std::string name_of_terminal() {
  if (!isatty(STDERR_FILENO)) return "";
  char name[256];
  return ttyname_r(STDERR_FILENO, name, sizeof name) == 0 ? name : "/dev/tty";
}

fs::path temporary_folder() {
  const fs::path parent = fs::temp_directory_path();
  std::string name = (parent / "bonfire-XXXXXX").string();
  require_system(mkdtemp(name.data()) != nullptr, "cannot make a folder in '{}'", parent.string());
  return name;
}

fs::path make_folder(const Config& config, const StartOptions& options) {
  if (!options.run_folder.empty()) return options.run_folder;
  return options.keep_folder ? make_run_folder(config) : temporary_folder();
}

bool holds_nothing(const fs::path& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.file_size() > 0 && entry.path() != folder / launch_file) return false;
  return true;
}

// A run that failed leaves no folder that nobody has heard of: one that is of use is named, any other goes.
void settle_folder(const fs::path& folder, const Config& config, const StartOptions& options, const Log& log) {
  try {
    if (options.keep_folder && !holds_nothing(folder))
      log.info("what the run has written is in {}", folder.string());
    else if (options.keep_folder)
      discard_run_folder(config, folder);
    else
      fs::remove_all(folder);
  } catch (const fs::filesystem_error& error) {
    log.warning("'{}' is left: {}", folder.string(), error.code().message());
  }
}

// How long ranks may be silent or late: the user's environment wins over the file.
constexpr const char* watch_names[] = {"BONFIRE_STALL_TIMEOUT", "BONFIRE_HEARTBEAT_TIMEOUT"};

Variables watch_variables(const Config& config, Variables variables) {
  variables.try_emplace(watch_names[0], fmt::format("{}", config.run.watchdog));
  variables.try_emplace(watch_names[1], fmt::format("{}", config.run.heartbeat));
  return variables;
}

// The logs of one of several nodes, which are begun before there is a run folder for them.
class NodeLogs {
 public:
  NodeLogs() : scratch_(temporary_folder()) {}

  fs::path logs() const { return scratch_ / "logs"; }
  fs::path folder_file() const { return scratch_ / "run_folder"; }
  void discard() const { fs::remove_all(scratch_); }
  // All went well: they go to what else the run has written, and that is returned; on this machine, where the nodes share
  // no files.
  fs::path hand_over() const {
    std::string folder;
    std::ifstream file(folder_file());
    std::getline(file, folder);
    try {
      if (folder.empty()) throw fs::filesystem_error("the run folder is not known", std::error_code());
      fs::create_directories(fs::path(folder) / "logs");
      fs::copy(logs(), fs::path(folder) / "logs", fs::copy_options::recursive | fs::copy_options::overwrite_existing);
      discard();
    } catch (const fs::filesystem_error& error) {
      Log().warning("the ranks' output is left in {}: {}", logs().string(), error.what());
    }
    return folder;
  }

 private:
  fs::path scratch_;
};

int launch_here(const Config& config, const StartOptions& options, const Environment& place) {
  LauncherOptions launcher;
  launcher.program = {fs::read_symlink("/proc/self/exe").string()};
  launcher.program.insert(launcher.program.end(), options.rank_arguments.begin(), options.rank_arguments.end());
  launcher.ranks = place.local_size;
  launcher.nodes = place.nodes;
  launcher.node = place.node;
  launcher.token = place.token;
  if (place.nodes > 1) launcher.master = {place.address, place.port};
  launcher.address = options.address;
  launcher.max_restarts = options.max_restarts;
  if (config.layout.server > 0 && config.layout.server_lost != "stop")
    launcher.lost =
        LostRanks{.from = static_cast<int>(config.layout.server),
                  .policy = config.layout.server_lost == "drop" ? LostRanks::Policy::drop : LostRanks::Policy::wait};
  launcher.echo = Echo::first;
  launcher.ranks_take_signals = true;
  const Variables variables = watch_variables(config, process_variables());
  for (const char* name : watch_names) launcher.variables[name] = variables.at(name);
  // Ranks that take too long say so themselves. The user's environment wins here, too.
  if (!variables.contains("BONFIRE_STOP_TIMEOUT"))
    launcher.stop_grace = std::chrono::milliseconds(static_cast<std::int64_t>(config.checkpoint.grace * 1e3) + 5000);
  if (const std::string terminal = name_of_terminal(); !terminal.empty()) launcher.variables[terminal_variable] = terminal;
  // Before a folder is made.
  check_launch(launcher);
  fs::path folder;
  std::optional<NodeLogs> logs;
  launcher.prepare = [&](LauncherOptions& prepared) {
    launcher_hears_requests();
    if (place.nodes > 1) {
      logs.emplace();
      prepared.log_folder = logs->logs();
      prepared.variables[folder_file_variable] = logs->folder_file().string();
      prepared.variables[launch_variable] = random_token();
      return;
    }
    folder = make_folder(config, options);
    prepared.log_folder = folder / "logs";
    prepared.variables[folder_variable] = folder.string();
  };
  const LaunchOutcome outcome = [&] {
    try {
      return launch_ranks(std::move(launcher));
    } catch (...) {
      const Log log([](LogLevel, std::string_view words) { say_last(fmt::format("bonfire: {}\n", words)); });
      if (!folder.empty()) settle_folder(folder, config, options, log);
      if (logs) logs->discard();
      throw;
    }
  }();
  // Where something went wrong, the launcher has named the logs.
  if (outcome.exit_code != kDone) return outcome.exit_code;
  if (logs && options.keep_folder) folder = logs->hand_over();
  if (logs && !options.keep_folder) logs->discard();
  if (!logs && !options.keep_folder) fs::remove_all(folder);
  if (outcome.stdout_error != 0) {
    fail("stdout cannot be written: {}{}", std::strerror(outcome.stdout_error),
         options.keep_folder && !folder.empty()
             ? fmt::format("; what was to go there is in {}", (folder / "report.json").string())
             : "");
  }
  return outcome.exit_code;
}

// The folder that rank 0 has made, where it is to be settled if the run fails. Other threads may end the run.
class OwnFolder {
 public:
  void set(const fs::path& folder) {
    const std::lock_guard lock(mutex_);
    folder_ = folder;
  }
  fs::path get() {
    const std::lock_guard lock(mutex_);
    return folder_;
  }

 private:
  std::mutex mutex_;
  fs::path folder_;
};

// This process's parent, and no other one, before or after, on any machine.
std::string name_of_parent() {
  std::string boot, stat;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::getline(std::ifstream(fmt::format("/proc/{}/stat", getppid())), stat);
  // Behind the name of its program, which may hold anything, the 20th is when it began.
  std::istringstream words(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
  std::string begin;
  for (int word = 0; word < 20; ++word) words >> begin;
  return fmt::format("{} {} {}", boot, getppid(), begin);
}

// What all attempts of one launch have in common, and two launches do not.
std::string launch_of(const Environment& place) {
  const auto variables = process_variables();
  if (const auto own = variables.find(launch_variable); own != variables.end()) return "bonfire " + own->second;
  const std::string source = name_of(place.source);
  // A job that is requeued keeps its number; its steps are counted anew.
  if (place.source == LaunchSource::slurm) return fmt::format("{} {}", source, variables.at("SLURM_JOB_ID"));
  // torchrun says "none" where nobody has named the run. Its agent starts all attempts.
  const bool named = !place.run_id.empty() && place.run_id != "none";
  return fmt::format("{} {}", source, named ? place.run_id : name_of_parent());
}

// Where rank 0 goes on, or begins.
fs::path take_folder(const Config& config, const StartOptions& options, const Environment& place) {
  if (!options.keep_folder) return make_folder(config, options);
  const std::string launch = launch_of(place);
  // Ranks that are started again go on in the folder that they had. They may have had none yet.
  const auto before = place.restarts > 0 && options.run_folder.empty() ? run_folder_of(config, launch) : std::nullopt;
  if (before) {
    require_restartable(config, *before);
    return *before;
  }
  const auto folder = make_folder(config, options);
  sign_run_folder(folder, launch);
  return folder;
}

// Where rank 0's folder stands for ranks that come back alone.
constexpr const char* folder_key = "run folder";

// Rank 0's folder, known to all. Collective.
fs::path agree_on_folder(const World& world, const Config& config, const StartOptions& options, const Environment& place,
                         OwnFolder& own) {
  do_or_fail_together(world.group(), [&] {
    if (world.rank() != 0) return;
    own.set(take_folder(config, options, place));
    // Now: it may be that this rank is ended before it can say anything.
    world.log().info("{}: {}", options.keep_folder ? "run folder" : "temporary folder", own.get().string());
    world.store().set(folder_key, own.get().string());
  });
  return hear(world.group(), own.get().string(), 0, world.device());
}

JoinOptions join_options(const Config& config, Variables variables) {
  JoinOptions join;
  join.world.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.run.timeout * 1e3));
  join.world.debug = config.run.debug_collectives;
  join.device = [&config](const Environment& place) {
    // Workers and their servers meet on the host; a worker computes where it likes.
    const c10::Device device = config.layout.server > 0 ? c10::Device(c10::kCPU) : device_of(config, place.local_rank);
    set_current(device);
    return device;
  };
  if (progress_to_stderr().terminal) {
    // Words take the bar's line; it is drawn again below them.
    join.world.log = Log([plain = Log()](LogLevel level, std::string_view words) {
      std::fputs("\r\033[K", stderr);
      plain.write(level, words);
    });
  }
  // Ranks that were started with different files or versions must not train together.
  join.configuration = fmt::format("{} {:016x}", BONFIRE_VERSION, Random(0).fork(to_toml(config)).key());
  join.variables = watch_variables(config, std::move(variables));
  return join;
}

// How many ranks to start on this node.
int ranks_here(const Config& config, const StartOptions& options, const Variables& variables) {
  if (options.ranks) return *options.ranks;
  if (const auto asked = asked_ranks(variables)) return *asked;
  const auto axes = {"layout.pipeline", "layout.replicate", "layout.shard", "layout.context",
                     "layout.tensor",   "layout.replicas",  "layout.server"};
  if (std::any_of(axes.begin(), axes.end(), [&](const char* axis) { return config.given(axis); })) {
    if (config.ranks() % options.nodes != 0)
      fail_config("--nodes {}: the {} ranks of [layout] cannot be shared between them; allowed: a divisor, or --ranks",
                  options.nodes, config.ranks());
    return static_cast<int>(config.ranks() / options.nodes);
  }
  return config.run.device == "cpu" ? 1 : std::max(1, gpu_count());
}

// Who and where this process is. Where it is to start ranks of its own accord, nobody knows yet how many.
Environment find_place(const StartOptions& options, const Variables& variables) {
  if (options.nodes == 1 && (options.node != 0 || !options.master.empty()))
    fail_config("--node-rank and --master need --nodes");
  Environment place = options.ranks || options.nodes > 1 ? Environment{} : resolve_environment(variables);
  if (place.source == LaunchSource::none) {
    place.nodes = options.nodes;
    place.node = options.node;
    if (place.nodes > 1) {
      if (options.master.empty()) fail_config("several nodes need --master HOST:PORT, where node 0 listens");
      const Endpoint master = parse_endpoint(options.master);
      place.address = master.host;
      place.port = master.port;
    }
    place.launches_itself = true;
  }
  return place;
}

// OpenMP has read its variables when this process was loaded. A launcher that is not ours has not set them: the program
// begins again with them, which costs nothing but the loading, since nothing has been done yet.
void spin_shortly_from_the_start(Variables& variables) {
  if (!spin_shortly(variables)) return;
  std::vector<std::string> words;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setenv(spin_variable, short_spin, 1);
  execv("/proc/self/exe", arguments.data());
  // Not possible here: then it waits as OpenMP does.
}

// While it lives, requests to stop are `vote`'s to answer.
class Votes {
 public:
  Votes(StopSignals& requests, StopVote& vote, Grace& grace) : requests_(requests) {
    requests_.answer_with([&vote, &grace] {
      grace.begin();
      vote.ask();
    });
  }
  ~Votes() { requests_.answer_with({}); }
  Votes(const Votes&) = delete;
  Votes& operator=(const Votes&) = delete;

 private:
  StopSignals& requests_;
};

// To this node's launcher, if it has asked. Where that cannot be written, it leaves the logs where they are.
void say_folder(const fs::path& folder) {
  if (const char* file = std::getenv(folder_file_variable); file != nullptr) std::ofstream(file) << folder.string() << '\n';
}

// One rank, from the moment at which it is known to be one.
int run_as_rank(const Config& config, const StartOptions& options, JoinOptions join, const fs::path& given,
                const RankBody& body, const Environment& place) {
  const auto own = std::make_shared<OwnFolder>();
  join.on_failure = [&config, &options, own, log = join.world.log] {
    if (const fs::path folder = own->get(); !folder.empty()) settle_folder(folder, config, options, log);
  };
  StopSignals& requests = *join.stop;
  const bool returned = returns_of(join.variables) > 0;
  bool begun = false;
  const int code = run_rank(std::move(join), [&](World& world) {
    const std::chrono::duration<double> length(config.checkpoint.grace);
    Grace grace(length, [&world, length] {
      world.log().error(
          "rank {} was asked to stop {:.3g} s ago and has not ended its step and saved: it ends now, and what was saved "
          "last "
          "stays (checkpoint.grace = {:.3g})",
          world.rank(), length.count(), length.count());
      std::_Exit(kFailed);
    });
    const auto patience = std::min<std::chrono::duration<double>>(std::chrono::seconds(30), length / 2);
    StopVote vote(world.store(), {.rank = world.rank(),
                                  .size = world.size(),
                                  .returned = returned,
                                  .patience = std::chrono::duration_cast<std::chrono::milliseconds>(patience),
                                  .failed = [&grace] { grace.cancel(); },
                                  .log = world.log()});
    const Votes votes(requests, vote, grace);
    begun = true;
    const auto agree = [&]() -> fs::path {
      return returned ? fs::path(world.store().get_to_str(folder_key))
                      : agree_on_folder(world, config, options, place, *own);
    };
    const fs::path folder = given.empty() ? agree() : given;
    if (given.empty() && world.local_rank() == 0) say_folder(folder);
    const int code = body(world, {.folder = folder, .stop = vote, .restarts = place.restarts});
    if (given.empty() && !options.keep_folder && world.rank() == 0) fs::remove_all(folder);
    return code;
  });
  if (!begun && code == kStoppedAfterSaving && place.rank == 0) say_stopped_before_the_start();
  return code;
}

}  // namespace

int start(Config& config, const StartOptions& options, const RankBody& body) {
  Variables variables = process_variables();
  Environment place = find_place(options, variables);
  if (!place.launches_itself) spin_shortly_from_the_start(variables);
  // Where the starter has checked, or another rank of this machine does, nothing is read twice.
  const auto folder = variables.find(folder_variable);
  const bool has_folder = place.source == LaunchSource::bonfire && folder != variables.end();
  const bool started_by_us =
      has_folder || (place.source == LaunchSource::bonfire && variables.contains(folder_file_variable));
  // Before anything that takes time, such as looking for GPUs.
  StopSignals* requests = nullptr;
  if (place.launches_itself) {
    end_on_request();
    if (place.source == LaunchSource::none) place.local_size = ranks_here(config, options, variables);
    place.size = place.local_size * place.nodes;
  } else {
    // Until it has joined the others, nobody needs it to end in good order.
    // One that was lost and is back answers when it can vote.
    const StopSignals::Answer end = [rank = place.rank] {
      if (rank == 0) say_stopped_before_the_start();
      std::_Exit(kStoppedAfterSaving);
    };
    requests = &StopSignals::take(returns_of(variables) > 0 ? StopSignals::Answer{} : end);
  }
  resolve(config, place.size);
  if (!place.launches_itself && config.layout.server_lost != "stop" && !variables.contains("BONFIRE_WHEN_LOST"))
    fail_key(config, "layout.server_lost",
             fmt::format("{} has started this rank, and ends all of them when one fails; allowed here: stop, or --ranks",
                         name_of(place.source)));
  if (!started_by_us) {
    device_of(config, place.local_rank);
    const auto look = place.launches_itself ? LookAt::files : LookAt::manifest;
    if (options.check) options.check(config, look);
    require_memory(config);
    check_weights(config, look);
    if (place.local_rank == 0) check_data(config, Log());
  }
  if (place.launches_itself) return launch_here(config, options, place);
  if (options.max_restarts > 0) {
    fail_config("--max-restarts {}: {} has started this rank, so only that can start it again; allowed here: 0, or --ranks",
                options.max_restarts, name_of(place.source));
  }

  at::set_num_threads(config.run.threads > 0 ? static_cast<int>(config.run.threads)
                                             : threads_per_rank(variables, place.local_size, usable_cores()));
  JoinOptions join = join_options(config, variables);
  join.stop = requests;
  return run_as_rank(config, options, std::move(join), has_folder ? fs::path(folder->second) : fs::path(), body, place);
}

ProgressLine::Options progress_to_stderr() {
  auto options = ProgressLine::to_stderr();
  if (const char* terminal = std::getenv(terminal_variable); terminal && !options.terminal) {
    options.terminal = true;
    // Only to ask how wide it is; where it cannot be opened, the usual width has to do.
    const auto file = std::make_shared<Socket>(open(terminal, O_RDONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
    options.columns = [file] { return ProgressLine::columns_of(file->fd()); };
  }
  return options;
}

}  // namespace bonfire::cli
