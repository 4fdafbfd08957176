#include "bonfire/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "bonfire/base/output_file.h"
#include "bonfire/checkpoint/manifest.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "step-", unfinished = ".part";

std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + prefix.size(), end, step);
  if (error != std::errc() || read != end || checkpoint_name(step) != name) return std::nullopt;
  return step;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) entries.push_back(entry.path());
  return entries;
}

void rename_or_throw(const fs::path& from, const fs::path& to, unsigned flags) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return;
  const int reason = errno;
  throw WriteError(to, reason, fmt::format("renaming '{}'", from.string()));
}

// It is not complete from then on, whatever happens meanwhile.
void remove_checkpoint(const fs::path& checkpoint) {
  fs::path going = checkpoint;
  if (!going.string().ends_with(unfinished)) {
    going += fmt::format(".old{}", unfinished);
    fs::remove_all(going);
    rename_or_throw(checkpoint, going, 0);
  }
  fs::remove_all(going);
}

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:08}", prefix, step); }

std::vector<fs::path> complete_checkpoints(const fs::path& folder) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  for (const auto& path : entries_of(folder))
    if (const auto step = step_of(path.filename().string()); step && fs::exists(path / manifest_name))
      found.emplace_back(*step, path);
  std::sort(found.rbegin(), found.rend());
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::optional<fs::path> latest_checkpoint(const fs::path& folder) {
  const auto all = complete_checkpoints(folder);
  return all.empty() ? std::nullopt : std::optional(all.front());
}

fs::path unfinished_checkpoint(const fs::path& folder, std::int64_t step, const std::string& mark) {
  return folder / fmt::format("{}.{}{}", checkpoint_name(step), mark, unfinished);
}

fs::path finish_checkpoint(const fs::path& unfinished_folder, std::int64_t step) {
  const fs::path final = unfinished_folder.parent_path() / checkpoint_name(step);
  if (fs::exists(final)) {
    // Both are complete, so at every moment one of this name is.
    rename_or_throw(unfinished_folder, final, RENAME_EXCHANGE);
    fs::remove_all(unfinished_folder);
  } else {
    rename_or_throw(unfinished_folder, final, 0);
  }
  // Also brings the folder's new name to the disk.
  write_file(final.parent_path() / "latest", checkpoint_name(step) + "\n");
  return final;
}

void remove_old_checkpoints(const fs::path& folder, int keep, const fs::path& newest) {
  if (keep <= 0) return;
  auto all = complete_checkpoints(folder);
  const auto at = std::find(all.begin(), all.end(), newest);
  if (at == all.end()) return;
  // A run that went back does not come to the later ones: these go first.
  std::rotate(all.begin(), at, all.end());
  while (all.size() > static_cast<std::size_t>(keep)) {
    remove_checkpoint(all.back());
    all.pop_back();
  }
}

void remove_unfinished_checkpoints(const fs::path& folder) {
  for (const auto& path : entries_of(folder))
    if (const auto name = path.filename().string(); name.starts_with(prefix) && name.ends_with(unfinished))
      remove_checkpoint(path);
}

}  // namespace bonfire
