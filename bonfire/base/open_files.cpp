#include "bonfire/base/open_files.h"

#include <sys/resource.h>

#include <filesystem>

#include "bonfire/base/error.h"

namespace bonfire {

bool raise_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

long open_files() {
  std::error_code error;
  long count = 0;
  for (std::filesystem::directory_iterator file("/proc/self/fd", error), end; !error && file != end; file.increment(error))
    ++count;
  return count;
}

void require_open_files(long needed, const std::string& what) {
  raise_open_files();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (limit.rlim_cur < static_cast<rlim_t>(needed))
    fail_config("{} need about {} open files, and this process may have {} (ulimit -Hn): raise the hard limit", what, needed,
                limit.rlim_cur);
}

}  // namespace bonfire
