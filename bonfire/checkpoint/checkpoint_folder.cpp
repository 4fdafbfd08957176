#include "bonfire/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include "bonfire/base/input_file.h"
#include "bonfire/base/look.h"
#include "bonfire/base/output_file.h"
#include "bonfire/checkpoint/manifest.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "step-", unfinished = ".part", replaced = ".replaced.part";
constexpr const char* pointer_name = "latest";

std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + prefix.size(), end, step);
  if (error != std::errc() || read != end || checkpoint_name(step) != name) return std::nullopt;
  return step;
}

// Of a checkpoint that has made room for another of its step.
std::optional<std::int64_t> replaced_step_of(const std::string& name) {
  if (!name.ends_with(replaced)) return std::nullopt;
  return step_of(name.substr(0, name.size() - replaced.size()));
}

// What "latest" says; empty where nobody has written it.
std::string name_of_latest(const fs::path& folder) {
  constexpr std::uint64_t most = 4096;
  const fs::path file = folder / pointer_name;
  if (!is_there(file)) return {};
  const auto text = InputFile(file.string()).text(most);
  return text.substr(0, text.find('\n'));
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;
  const int reason = errno;
  throw WriteError(to, reason, fmt::format("renaming '{}'", from.string()));
}

// Both are complete, so at every moment one of this name is. False where the file system has no such operation, as NFS.
bool exchanged(const fs::path& one, const fs::path& other) {
  if (::renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return true;
  const int reason = errno;
  if (reason == EINVAL || reason == ENOSYS || reason == ENOTSUP) return false;
  throw WriteError(other, reason, fmt::format("exchanging it with '{}'", one.string()));
}

// It is not complete from then on, whatever happens meanwhile.
void remove_checkpoint(const fs::path& checkpoint) {
  fs::path going = checkpoint;
  if (!going.string().ends_with(unfinished)) {
    going += fmt::format(".old{}", unfinished);
    fs::remove_all(going);
    rename_or_throw(checkpoint, going);
  }
  fs::remove_all(going);
}

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:08}", prefix, step); }

std::vector<fs::path> complete_checkpoints(const fs::path& folder) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  const auto entries = entries_of(folder);
  for (const auto& path : entries)
    if (const auto step = step_of(path.filename().string()); step && is_there(path / manifest_name))
      found.emplace_back(*step, path);
  // One whose successor never came.
  for (const auto& path : entries)
    if (const auto step = replaced_step_of(path.filename().string());
        step && std::none_of(found.begin(), found.end(), [&](const auto& one) { return one.first == *step; }))
      found.emplace_back(*step, path);
  std::sort(found.rbegin(), found.rend());
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  const auto latest = std::find(paths.begin(), paths.end(), folder / name_of_latest(folder));
  if (latest != paths.end()) std::rotate(paths.begin(), latest, paths.end());
  return paths;
}

std::optional<fs::path> latest_checkpoint(const fs::path& folder) {
  const auto all = complete_checkpoints(folder);
  return all.empty() ? std::nullopt : std::optional(all.front());
}

fs::path unfinished_checkpoint(const fs::path& folder, std::int64_t step, const std::string& mark) {
  return folder / fmt::format("{}.{}{}", checkpoint_name(step), mark, unfinished);
}

FinishedCheckpoint finish_checkpoint(const fs::path& unfinished_folder, std::int64_t step) {
  FinishedCheckpoint finished{.checkpoint = unfinished_folder.parent_path() / checkpoint_name(step), .replaced = {}};
  const fs::path& final = finished.checkpoint;
  if (!is_there(final)) {
    rename_or_throw(unfinished_folder, final);
  } else if (exchanged(unfinished_folder, final)) {
    finished.replaced = unfinished_folder;
  } else {
    finished.replaced = final;
    finished.replaced += replaced;
    fs::remove_all(finished.replaced);
    rename_or_throw(final, finished.replaced);
    rename_or_throw(unfinished_folder, final);
  }
  // Also brings the folder's new name to the disk.
  write_file(final.parent_path() / pointer_name, checkpoint_name(step) + "\n");
  return finished;
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
  for (const auto& path : entries_of(folder)) {
    const auto name = path.filename().string();
    if (!name.ends_with(unfinished)) continue;
    const auto step = replaced_step_of(name);
    if (step && !is_there(folder / checkpoint_name(*step)))
      rename_or_throw(path, folder / checkpoint_name(*step));
    else if (name.starts_with(prefix) || name.starts_with(pointer_name) || name.starts_with(probe_prefix))
      remove_checkpoint(path);
  }
}

}  // namespace bonfire
