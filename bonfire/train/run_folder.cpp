#include "bonfire/train/run_folder.h"

#include <unistd.h>

#include <charconv>
#include <system_error>

#include "bonfire/base/error.h"
#include "bonfire/base/input_file.h"
#include "bonfire/base/look.h"
#include "bonfire/base/output_file.h"

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

// The number of a run folder of this name; 0: it is none.
int number_of(const Config& config, const std::string& name) {
  if (name == config.run.name) return 1;
  const std::string prefix = config.run.name + "-";
  if (!name.starts_with(prefix)) return 0;
  int number = 0;
  const char* const end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + prefix.size(), end, number);
  return error == std::errc() && read == end && number > 1 ? number : 0;
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
  if (missing || !is_folder(latest)) return std::nullopt;
  return folder.is_absolute() ? folder : latest.parent_path() / folder;
}

void sign_run_folder(const fs::path& folder, const std::string& launch) {
  write_file(folder / launch_file, launch + "\n", Survives::process);
}

std::optional<fs::path> run_folder_of(const Config& config, const std::string& launch) {
  constexpr std::uint64_t most = 1 << 16;
  std::optional<fs::path> newest;
  int last = 0;
  for (const auto& folder : entries_of(config.run.folder)) {
    const int number = number_of(config, folder.filename().string());
    if (number <= last || !is_there(folder / launch_file)) continue;
    if (InputFile((folder / launch_file).string()).text(most) != launch + "\n") continue;
    last = number;
    newest = folder;
  }
  return newest;
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
