#include "bonfire/comm/launch.h"

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Parallel.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/descriptors.h"
#include "bonfire/comm/launcher.h"

namespace bonfire {
namespace {

int number_of_ranks(const std::string& name, std::string_view text) {
  int ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ranks);
  if (error != std::errc() || end != text.data() + text.size() || ranks < 1 || ranks > 4096)
    fail_config("{} is '{}': a number from 1 to 4096 is needed", name, text);
  return ranks;
}

// How many ranks the user asked for, if at all. The program's own arguments are not ours to understand: only --ranks is.
std::optional<int> ranks_to_start(int argc, char** argv, const Environment& place, const Variables& variables) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    if (argument == "--ranks") {
      if (i + 1 == argc) fail_config("--ranks needs a number");
      return number_of_ranks("--ranks", argv[i + 1]);
    }
    if (argument.starts_with("--ranks=")) return number_of_ranks("--ranks", argument.substr(8));
  }
  return place.source == LaunchSource::none ? asked_ranks(variables) : std::nullopt;
}

LauncherOptions itself(int argc, char** argv) {
  LauncherOptions options;
  options.program = {std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) options.program.emplace_back(argv[i]);
  return options;
}

}  // namespace

int launch(int argc, char** argv, const std::function<void(World&)>& program, JoinOptions options) {
  keep_standard_streams();
  try {
    const Environment place = resolve_environment(options.variables);
    // Already started by our launcher: --ranks was for that one.
    if (place.source != LaunchSource::bonfire) {
      if (const std::optional<int> ranks = ranks_to_start(argc, argv, place, options.variables)) {
        LauncherOptions launcher = itself(argc, argv);
        launcher.ranks = *ranks;
        return launch_ranks(std::move(launcher)).exit_code;
      }
      if (place.launches_itself) {
        LauncherOptions launcher = itself(argc, argv);
        launcher.ranks = place.local_size;
        launcher.nodes = place.nodes;
        launcher.node = place.node;
        launcher.token = place.token;
        if (place.nodes > 1) launcher.master = {place.address, place.port};
        return launch_ranks(std::move(launcher)).exit_code;
      }
    }
    at::set_num_threads(threads_per_rank(options.variables, place.local_size, usable_cores()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bonfire: %s\n", error.what());
    return dynamic_cast<const ConfigError*>(&error) != nullptr ? 2 : 1;
  }
  if (!options.device && options.world.device.is_cpu())
    options.device = [log = options.world.log](const Environment& place) { return local_device(place, log); };
  return run_rank(std::move(options), [&](World& world) {
    program(world);
    return 0;
  });
}

}  // namespace bonfire
