#include "bonfire/base/look.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

fs::file_status look_at(const fs::path& path) {
  std::error_code reason;
  const auto status = fs::status(path, reason);
  if (status.type() == fs::file_type::none) fail_config("'{}': {}", path.string(), reason.message());
  return status;
}

}  // namespace

bool is_there(const fs::path& path) { return fs::exists(look_at(path)); }
bool is_folder(const fs::path& path) { return fs::is_directory(look_at(path)); }

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  if (!is_there(folder)) return entries;
  std::error_code reason;
  for (fs::directory_iterator at(folder, reason), end; !reason && at != end; at.increment(reason))
    entries.push_back(at->path());
  if (reason) fail_config("'{}': cannot be listed: {}", folder.string(), reason.message());
  return entries;
}

void require_readable(const fs::path& folder) {
  for (const auto& file : entries_of(folder))
    if (::faccessat(AT_FDCWD, file.c_str(), R_OK, AT_EACCESS) != 0 && errno == EACCES)
      fail_config("'{}': {}", file.string(), std::strerror(errno));
}

}  // namespace bonfire
