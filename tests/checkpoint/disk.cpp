#include "tests/checkpoint/disk.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>

namespace bonfire::testing {

Disk disk;

namespace {

using What = Disk::What;

void tell(What what, const std::string& path, const std::string& to = {}) {
  if (disk.on_change) disk.on_change(what, path, to);
}

std::string path_of(int file) {
  char path[PATH_MAX];
  const auto length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  return length < 0 ? "" : std::string(path, static_cast<std::size_t>(length));
}

std::string path_of(int folder, const char* path) {
  return folder == AT_FDCWD || path[0] == '/' ? path : path_of(folder) + "/" + path;
}

// A call about this file, or about one that is open: whether it fails.
template <class... Which>
bool refuses(const Which&... which) {
  if (disk.within.empty()) return false;
  const std::string path(path_of(which...));
  if (!path.starts_with(disk.within)) return false;
  const int call = ++disk.calls, failing = disk.failing;
  if (failing == 0 || (disk.stays ? call < failing : call != failing)) return false;
  if (disk.dies) kill(getpid(), SIGKILL);
  errno = disk.reason;
  return true;
}

int opened(int folder, const char* path, int flags, mode_t mode) {
  if (refuses(folder, path)) return -1;
  return static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
}

ssize_t read_from(int file, void* bytes, size_t count, off_t at) {
  if (disk.on_read) disk.on_read(count);
  if (refuses(file)) return -1;
  return syscall(SYS_pread64, file, bytes, count, at);
}

int removed(int folder, const char* path, int flags) {
  if (refuses(folder, path)) return -1;
  return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
}

}  // namespace
}  // namespace bonfire::testing

#define BONFIRE_SYSTEM extern "C" __attribute__((visibility("default")))

// Of a function whose third argument is there where it makes a file.
#define BONFIRE_MODE_OF(last, flags)                                \
  mode_t mode = 0;                                                  \
  if (((flags)&O_CREAT) != 0 || ((flags)&O_TMPFILE) == O_TMPFILE) { \
    va_list more;                                                   \
    va_start(more, last);                                           \
    mode = static_cast<mode_t>(va_arg(more, int));                  \
    va_end(more);                                                   \
  }

BONFIRE_SYSTEM int open(const char* path, int flags, ...) {
  BONFIRE_MODE_OF(flags, flags)
  return bonfire::testing::opened(AT_FDCWD, path, flags, mode);
}
BONFIRE_SYSTEM int open64(const char* path, int flags, ...) {
  BONFIRE_MODE_OF(flags, flags)
  return bonfire::testing::opened(AT_FDCWD, path, flags, mode);
}
BONFIRE_SYSTEM int openat(int folder, const char* path, int flags, ...) {
  BONFIRE_MODE_OF(flags, flags)
  return bonfire::testing::opened(folder, path, flags, mode);
}
BONFIRE_SYSTEM int openat64(int folder, const char* path, int flags, ...) {
  BONFIRE_MODE_OF(flags, flags)
  return bonfire::testing::opened(folder, path, flags, mode);
}
BONFIRE_SYSTEM int close(int file) {
  using namespace bonfire::testing;
  // Closed it is, whatever it says, as the system's.
  const bool refused = refuses(file);
  const int reason = errno, code = static_cast<int>(syscall(SYS_close, file));
  if (!refused) return code;
  errno = reason;
  return -1;
}
BONFIRE_SYSTEM int fsync(int file) {
  using namespace bonfire::testing;
  if (refuses(file)) return -1;
  if (disk.on_change) tell(What::flush, path_of(file));
  return static_cast<int>(syscall(SYS_fsync, file));
}
BONFIRE_SYSTEM int rename(const char* from, const char* to) noexcept {
  using namespace bonfire::testing;
  if (refuses(AT_FDCWD, from)) return -1;
  tell(What::rename, from, to);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
BONFIRE_SYSTEM int renameat2(int a, const char* from, int b, const char* to, unsigned flags) noexcept {
  using namespace bonfire::testing;
  if (refuses(a, from)) return -1;
  if (flags != 0 && !disk.exchanges) {
    errno = EINVAL;
    return -1;
  }
  tell(What::rename, from, to);
  return static_cast<int>(syscall(SYS_renameat2, a, from, b, to, flags));
}
BONFIRE_SYSTEM ssize_t pwrite(int file, const void* bytes, size_t count, off_t at) {
  using namespace bonfire::testing;
  if (refuses(file)) return -1;
  if (disk.on_change) tell(What::write, path_of(file));
  return syscall(SYS_pwrite64, file, bytes, count, at);
}
BONFIRE_SYSTEM int mkdir(const char* path, mode_t mode) noexcept {
  using namespace bonfire::testing;
  if (refuses(AT_FDCWD, path)) return -1;
  tell(What::make_folder, path);
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}
BONFIRE_SYSTEM ssize_t pread(int file, void* bytes, size_t count, off_t at) {
  return bonfire::testing::read_from(file, bytes, count, at);
}
BONFIRE_SYSTEM ssize_t pread64(int file, void* bytes, size_t count, off_t at) {
  return bonfire::testing::read_from(file, bytes, count, at);
}
BONFIRE_SYSTEM int unlink(const char* path) noexcept { return bonfire::testing::removed(AT_FDCWD, path, 0); }
BONFIRE_SYSTEM int rmdir(const char* path) noexcept { return bonfire::testing::removed(AT_FDCWD, path, AT_REMOVEDIR); }
BONFIRE_SYSTEM int unlinkat(int folder, const char* path, int flags) noexcept {
  return bonfire::testing::removed(folder, path, flags);
}
BONFIRE_SYSTEM int remove(const char* path) noexcept {
  const int code = bonfire::testing::removed(AT_FDCWD, path, 0);
  return code != 0 && errno == EISDIR ? bonfire::testing::removed(AT_FDCWD, path, AT_REMOVEDIR) : code;
}
