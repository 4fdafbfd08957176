#include "cli/start.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/base/version.h"
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
  std::string name = (fs::temp_directory_path() / "bonfire-XXXXXX").string();
  require(mkdtemp(name.data()) != nullptr, "cannot make a folder in '{}': {}", fs::temp_directory_path().string(),
          std::strerror(errno));
  return name;
}

fs::path make_folder(const Config& config, const StartOptions& options) {
  return options.keep_folder ? make_run_folder(config) : temporary_folder();
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
  launcher.max_restarts = options.max_restarts;
  launcher.echo = Echo::first;
  if (const std::string terminal = name_of_terminal(); !terminal.empty()) launcher.variables[terminal_variable] = terminal;
  // On several nodes the ranks agree on one folder.
  fs::path folder;
  if (place.nodes == 1) {
    folder = make_folder(config, options);
    launcher.log_folder = folder / "logs";
    launcher.variables[folder_variable] = folder.string();
  }
  const LaunchOutcome outcome = launch_ranks(std::move(launcher));
  if (!options.keep_folder) fs::remove_all(folder);
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
  variables.try_emplace("BONFIRE_STALL_TIMEOUT", fmt::format("{}", config.run.watchdog));
  variables.try_emplace("BONFIRE_HEARTBEAT_TIMEOUT", fmt::format("{}", config.run.heartbeat));
  join.variables = std::move(variables);
  return join;
}

// Who and where this process is, or, where it is to start ranks itself, how many.
Environment find_place(const Config& config, const StartOptions& options, const Variables& variables) {
  Environment place = options.ranks ? Environment{} : resolve_environment(variables);
  if (place.source == LaunchSource::none) {
    place.size = place.local_size = options.ranks ? *options.ranks : static_cast<int>(config.ranks());
    place.launches_itself = true;
  } else if (place.launches_itself) {
    place.size = place.local_size * place.nodes;
  }
  return place;
}

// OpenMP has read its variables when this process was loaded. A launcher that is not ours has not set them: the program
// begins again with them, which costs nothing but the loading, since nothing has been done yet.
void wait_passively_from_the_start(Variables& variables) {
  if (!wait_passively(variables)) return;
  std::vector<std::string> words;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  setenv(wait_policy_variable, "passive", 1);
  execv("/proc/self/exe", arguments.data());
  // Not possible here: then it waits as OpenMP does.
}

}  // namespace

int start(Config& config, const StartOptions& options, const RankBody& body) {
  Variables variables = process_variables();
  const Environment place = find_place(config, options, variables);
  resolve(config, place.size);
  if (place.source != LaunchSource::none && !place.launches_itself) wait_passively_from_the_start(variables);
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
                                             : threads_per_rank(variables, place.local_size,
                                                                static_cast<int>(std::thread::hardware_concurrency())));
  return run_rank(join_options(config, variables), [&](World& world) {
    const fs::path where = started_by_us ? fs::path(folder->second) : agree_on_folder(world, config, options);
    body(world, where);
    if (!started_by_us && !options.keep_folder && world.rank() == 0) fs::remove_all(where);
    return kDone;
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
