#include "cli/start.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/random.h"
#include "bonfire/base/system_error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/environment.h"
#include "bonfire/comm/join.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/wait_policy.h"
#include "bonfire/train/build.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/run_folder.h"
#include "cli/commands.h"

namespace bonfire::cli {
namespace {

namespace fs = std::filesystem;

// How a command tells the ranks that it starts where the run's folder is, and by that, that everything has been checked.
constexpr const char* folder_variable = "BONFIRE_RUN_FOLDER";
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
  return options.keep_folder ? make_run_folder(config) : temporary_folder();
}

// How long ranks may be silent or late: the user's environment wins over the file.
constexpr const char* watch_names[] = {"BONFIRE_STALL_TIMEOUT", "BONFIRE_HEARTBEAT_TIMEOUT"};

Variables watch_variables(const Config& config, Variables variables) {
  variables.try_emplace(watch_names[0], fmt::format("{}", config.run.watchdog));
  variables.try_emplace(watch_names[1], fmt::format("{}", config.run.heartbeat));
  return variables;
}

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
  launcher.echo = Echo::first;
  const Variables variables = watch_variables(config, process_variables());
  for (const char* name : watch_names) launcher.variables[name] = variables.at(name);
  if (const std::string terminal = name_of_terminal(); !terminal.empty()) launcher.variables[terminal_variable] = terminal;
  // On several nodes the ranks agree on one folder.
  fs::path folder;
  if (place.nodes == 1) {
    folder = make_folder(config, options);
    launcher.log_folder = folder / "logs";
    launcher.variables[folder_variable] = folder.string();
  }
  const LaunchOutcome outcome = launch_ranks(std::move(launcher));
  // Where something went wrong, the launcher has named the logs in it.
  if (!options.keep_folder && outcome.exit_code == kDone) fs::remove_all(folder);
  if (outcome.exit_code == kDone && outcome.stdout_error != 0) {
    const bool kept = options.keep_folder && place.nodes == 1;
    fail("stdout cannot be written: {}{}", std::strerror(outcome.stdout_error),
         kept ? fmt::format("; what was to go there is in {}", (folder / "report.json").string()) : "");
  }
  return outcome.exit_code;
}

// Rank 0's folder, known to all. Collective.
fs::path agree_on_folder(const World& world, const Config& config, const StartOptions& options) {
  constexpr std::int64_t longest = 4096;
  auto text = at::zeros({longest}, at::kByte);
  if (world.rank() == 0) {
    const std::string folder = make_folder(config, options).string();
    require(folder.size() < longest, "the path of the run folder has {} letters, at most {} are allowed", folder.size(),
            longest - 1);
    std::memcpy(text.data_ptr(), folder.data(), folder.size());
  }
  text = text.to(world.device());
  world.group().broadcast(text, 0).wait();
  text = text.cpu();
  return static_cast<const char*>(text.data_ptr());
}

JoinOptions join_options(const Config& config, Variables variables) {
  JoinOptions join;
  join.world.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.run.timeout * 1e3));
  join.world.debug = config.run.debug_collectives;
  join.device = [&config](const Environment& place) {
    const c10::Device device = device_of(config, place.local_rank);
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
  const auto axes = {"layout.pipeline", "layout.replicate", "layout.shard", "layout.context", "layout.tensor"};
  if (std::any_of(axes.begin(), axes.end(), [&](const char* axis) { return config.given(axis); })) {
    if (config.ranks() % options.nodes != 0)
      fail_config("--nodes {}: the {} ranks of [layout] cannot be shared between them; allowed: a divisor, or --ranks",
                  options.nodes, config.ranks());
    return static_cast<int>(config.ranks() / options.nodes);
  }
  return config.run.device == "cpu" ? 1 : std::max(1, gpu_count());
}

// Who and where this process is, or, where it is to start ranks itself, how many.
Environment find_place(const Config& config, const StartOptions& options, const Variables& variables) {
  if (options.nodes == 1 && (options.node != 0 || !options.master.empty()))
    fail_config("--node-rank and --master need --nodes");
  Environment place = options.ranks || options.nodes > 1 ? Environment{} : resolve_environment(variables);
  if (place.source == LaunchSource::none) {
    place.local_size = ranks_here(config, options, variables);
    place.nodes = options.nodes;
    place.node = options.node;
    place.size = place.local_size * place.nodes;
    if (place.nodes > 1) {
      if (options.master.empty()) fail_config("several nodes need --master HOST:PORT, where node 0 listens");
      const Endpoint master = parse_endpoint(options.master);
      place.address = master.host;
      place.port = master.port;
    }
    place.launches_itself = true;
  } else if (place.launches_itself) {
    place.size = place.local_size * place.nodes;
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

}  // namespace

int start(Config& config, const StartOptions& options, const RankBody& body) {
  Variables variables = process_variables();
  const Environment place = find_place(config, options, variables);
  resolve(config, place.size);
  if (place.source != LaunchSource::none && !place.launches_itself) spin_shortly_from_the_start(variables);
  // Where the starter has checked, or another rank of this machine does, nothing is read twice.
  const auto folder = variables.find(folder_variable);
  const bool started_by_us = place.source == LaunchSource::bonfire && folder != variables.end();
  if (!started_by_us) {
    device_of(config, place.local_rank);
    require_memory(config);
    if (place.local_rank == 0) check_data(config, Log());
  }
  if (place.launches_itself) return launch_here(config, options, place);
  if (options.max_restarts > 0) {
    fail_config("--max-restarts {}: {} has started this rank, so only that can start it again; allowed here: 0, or --ranks",
                options.max_restarts, name_of(place.source));
  }

  at::set_num_threads(config.run.threads > 0 ? static_cast<int>(config.run.threads)
                                             : threads_per_rank(variables, place.local_size, usable_cores()));
  return run_rank(join_options(config, variables), [&](World& world) {
    const fs::path where = started_by_us ? fs::path(folder->second) : agree_on_folder(world, config, options);
    const int code = body(world, where);
    if (!started_by_us && !options.keep_folder && world.rank() == 0) fs::remove_all(where);
    return code;
  });
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
