#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "bonfire/base/error.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/secret.h"
#include "bonfire/comm/socket.h"

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

// Written beside its place and linked into it: of several processes that do this at once, one wins and all read its key.
void make_key(const std::filesystem::path& file) {
  const std::string part = fmt::format("{}.{}.{}", file.string(), host_name(), getpid());
  const Socket made(open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!made)
    fail_config("BONFIRE_TOKEN is not set and '{}' cannot be written ({}): set it to a secret that the whole job shares",
                file.string(), std::strerror(errno));
  const std::string key = random_token() + "\n";
  const bool whole = write(made.fd(), key.data(), key.size()) == static_cast<ssize_t>(key.size());
  if (whole) [[maybe_unused]]
    const int linked = link(part.c_str(), file.c_str());
  unlink(part.c_str());
}

// Anybody who can read the key can join this user's runs: only the user may.
std::string read_key(const std::filesystem::path& file) {
  // Not to wait where it is a pipe.
  const Socket opened(open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!opened) fail_config("the key in '{}' cannot be read ({}): set BONFIRE_TOKEN", file.string(), std::strerror(errno));
  struct stat state {};
  if (fstat(opened.fd(), &state) != 0 || !S_ISREG(state.st_mode))
    fail_config("'{}' is no file that could hold a key: remove it, or set BONFIRE_TOKEN", file.string());
  if (state.st_uid != geteuid())
    fail_config(
        "'{}' belongs to user {}, who may read the key, and this process runs as user {}: remove it, or set "
        "BONFIRE_TOKEN",
        file.string(), state.st_uid, geteuid());
  if ((state.st_mode & 077) != 0)
    fail_config(
        "'{}' has mode {:04o}, so that others may read or write the key: at most 0600 is allowed; run chmod 600 on it, "
        "or remove it for a new one",
        file.string(), state.st_mode & 07777);
  char text[256];
  const ssize_t got = read(opened.fd(), text, sizeof text);
  std::string key(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  key = key.substr(0, key.find_first_of(" \t\r\n"));
  if (key.size() < 16) fail_config("'{}' holds no key: remove it, or set BONFIRE_TOKEN", file.string());
  return key;
}

}  // namespace

std::string job_token(const Variables& variables, const std::string& job) {
  const auto given = variables.find("BONFIRE_TOKEN");
  if (given != variables.end() && !given->second.empty()) return given->second;
  const std::filesystem::path file = key_file(variables);
  std::error_code error;
  std::filesystem::create_directories(file.parent_path().parent_path(), error);
  mkdir(file.parent_path().c_str(), 0700);
  if (!std::filesystem::exists(file, error)) make_key(file);
  // The ranks of a job get what belongs to the job, from which nobody can tell the key.
  return hex(hmac_sha256(read_key(file), "bonfire job " + job));
}

}  // namespace bonfire
