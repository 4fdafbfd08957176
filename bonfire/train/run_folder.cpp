#include "bonfire/train/run_folder.h"

#include <unistd.h>

#include <system_error>

#include "bonfire/base/error.h"

namespace bonfire {
namespace fs = std::filesystem;

namespace {

// Replaced in one move, so that it never points nowhere. A real file of that name is somebody else's: left alone.
void point_latest_to(const fs::path& folder, const Config& config) {
  const fs::path parent = folder.parent_path();
  const fs::path latest = parent / (config.run.name + "-latest"),
                 fresh = parent / fmt::format(".{}-latest-{}", config.run.name, ::getpid());
  if (fs::exists(fs::symlink_status(latest)) && !fs::is_symlink(latest)) return;
  std::error_code error;
  fs::create_directory_symlink(folder.filename(), fresh, error);
  if (!error) fs::rename(fresh, latest, error);
}

fs::path numbered(const Config& config, int number) {
  const fs::path parent = config.run.folder;
  return parent / (number == 1 ? config.run.name : fmt::format("{}-{}", config.run.name, number));
}

}  // namespace

fs::path make_run_folder(const Config& config) {
  const fs::path parent = config.run.folder;
  std::error_code error;
  fs::create_directories(parent, error);
  if (error)
    fail_key(config, "run.folder", fmt::format("cannot be made: {}; allowed: a path that can be written", error.message()));

  fs::path folder = numbered(config, 1);
  for (int number = 2; !fs::create_directory(folder, error); ++number) {
    if (error)
      fail_key(config, "run.folder",
               fmt::format("{} cannot be made: {}; allowed: a path that can be written", folder.string(), error.message()));
    folder = numbered(config, number);
  }

  point_latest_to(folder, config);
  return folder;
}

std::optional<fs::path> latest_run_folder(const Config& config) {
  std::error_code missing;
  const fs::path latest = fs::path(config.run.folder) / (config.run.name + "-latest");
  const fs::path folder = fs::read_symlink(latest, missing);
  if (missing || !fs::is_directory(latest)) return std::nullopt;
  return folder.is_absolute() ? folder : latest.parent_path() / folder;
}

void discard_run_folder(const Config& config, const fs::path& folder) {
  int number = 1;
  while (numbered(config, number) != folder && number < 1 << 20) ++number;
  fs::remove_all(folder);
  const fs::path latest = fs::path(config.run.folder) / (config.run.name + "-latest");
  if (!fs::is_symlink(latest) || fs::read_symlink(latest) != folder.filename()) return;
  while (--number > 0 && !fs::is_directory(numbered(config, number))) {
  }
  if (number > 0)
    point_latest_to(numbered(config, number), config);
  else
    fs::remove(latest);
}

}  // namespace bonfire
