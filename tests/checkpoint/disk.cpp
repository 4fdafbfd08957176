#include "tests/checkpoint/disk.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>

namespace bonfire::testing {

Disk disk;

namespace {

using What = Disk::What;

bool refuses() {
  const int call = ++disk.calls, failing = disk.failing;
  if (failing == 0 || (disk.stays ? call < failing : call != failing)) return false;
  errno = disk.reason;
  return true;
}

void tell(What what, const std::string& path, const std::string& to = {}) {
  if (disk.on_change) disk.on_change(what, path, to);
}

std::string path_of(int file) {
  char path[PATH_MAX];
  const auto length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  return length < 0 ? "" : std::string(path, static_cast<std::size_t>(length));
}

}  // namespace
}  // namespace bonfire::testing

#define BONFIRE_SYSTEM extern "C" __attribute__((visibility("default")))

BONFIRE_SYSTEM int fsync(int file) {
  using namespace bonfire::testing;
  if (refuses()) return -1;
  if (disk.on_change) tell(What::flush, path_of(file));
  return static_cast<int>(syscall(SYS_fsync, file));
}
BONFIRE_SYSTEM int rename(const char* from, const char* to) noexcept {
  using namespace bonfire::testing;
  if (refuses()) return -1;
  tell(What::rename, from, to);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
BONFIRE_SYSTEM int renameat2(int a, const char* from, int b, const char* to, unsigned flags) noexcept {
  using namespace bonfire::testing;
  if (refuses()) return -1;
  tell(What::rename, from, to);
  return static_cast<int>(syscall(SYS_renameat2, a, from, b, to, flags));
}
BONFIRE_SYSTEM ssize_t pwrite(int file, const void* bytes, size_t count, off_t at) {
  using namespace bonfire::testing;
  if (refuses()) return -1;
  if (disk.on_change) tell(What::write, path_of(file));
  return syscall(SYS_pwrite64, file, bytes, count, at);
}
BONFIRE_SYSTEM int mkdir(const char* path, mode_t mode) noexcept {
  using namespace bonfire::testing;
  if (refuses()) return -1;
  tell(What::make_folder, path);
  return static_cast<int>(syscall(SYS_mkdir, path, mode));
}
BONFIRE_SYSTEM ssize_t pread(int file, void* bytes, size_t count, off_t at) {
  if (bonfire::testing::disk.on_read) bonfire::testing::disk.on_read(count);
  return syscall(SYS_pread64, file, bytes, count, at);
}
