#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "bonfire/base/error.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/store_server.h"

namespace bonfire {
namespace {

std::filesystem::path key_file(const Variables& variables) {
  const auto found = variables.find("HOME");
  if (found != variables.end() && !found->second.empty())
    return std::filesystem::path(found->second) / ".config" / "bonfire" / "key";
  const passwd* user = getpwuid(getuid());
  if (user == nullptr)
    fail_config("BONFIRE_TOKEN is not set and this user has no home folder for a key: set it to a secret");
  return std::filesystem::path(user->pw_dir) / ".config" / "bonfire" / "key";
}

std::string read_key(const std::filesystem::path& file) {
  std::string key;
  std::ifstream(file) >> key;
  return key;
}

}  // namespace

std::string job_token(const Variables& variables, const std::string& job) {
  const auto given = variables.find("BONFIRE_TOKEN");
  if (given != variables.end() && !given->second.empty()) return given->second;
  const std::filesystem::path file = key_file(variables);
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  if (!std::filesystem::exists(file)) {
    // Written beside it and linked into place: of several processes that do this at once, one wins and all read its key.
    const std::string part = fmt::format("{}.{}.{}", file.string(), host_name(), getpid());
    const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
      fail_config("BONFIRE_TOKEN is not set and '{}' cannot be written ({}): set it to a secret that the whole job shares",
                  file.string(), std::strerror(errno));
    const std::string key = random_token() + "\n";
    const bool whole = write(fd, key.data(), key.size()) == static_cast<ssize_t>(key.size());
    close(fd);
    if (whole) [[maybe_unused]]
      const int linked = link(part.c_str(), file.c_str());
    unlink(part.c_str());
  }
  const std::string key = read_key(file);
  if (key.size() < 16) fail_config("'{}' holds no key: remove it, or set BONFIRE_TOKEN", file.string());
  return key + ":" + job;
}

}  // namespace bonfire
