#include "bonfire/train/run_folder.h"

#include <unistd.h>

#include <system_error>

#include "bonfire/base/error.h"

namespace bonfire {
namespace fs = std::filesystem;

fs::path make_run_folder(const Config& config) {
  const fs::path parent = config.run.folder;
  std::error_code error;
  fs::create_directories(parent, error);
  if (error)
    fail_key(config, "run.folder", fmt::format("cannot be made: {}; allowed: a path that can be written", error.message()));

  fs::path folder = parent / config.run.name;
  for (int number = 2; !fs::create_directory(folder, error); ++number) {
    if (error)
      fail_key(config, "run.folder",
               fmt::format("{} cannot be made: {}; allowed: a path that can be written", folder.string(), error.message()));
    folder = parent / fmt::format("{}-{}", config.run.name, number);
  }

  // Replaced in one move, so that it never points nowhere. A real file of that name is somebody else's: left alone.
  const fs::path latest = parent / (config.run.name + "-latest"),
                 fresh = parent / fmt::format(".{}-latest-{}", config.run.name, ::getpid());
  if (!fs::exists(fs::symlink_status(latest)) || fs::is_symlink(latest)) {
    fs::create_directory_symlink(folder.filename(), fresh, error);
    if (!error) fs::rename(fresh, latest, error);
  }
  return folder;
}

}  // namespace bonfire
