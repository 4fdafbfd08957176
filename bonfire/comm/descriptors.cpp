#include "bonfire/comm/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "bonfire/base/error.h"

namespace bonfire {

void keep_standard_streams() {
  while (true) {
    const int fd = open("/dev/null", O_RDWR);
    if (fd > STDERR_FILENO) ::close(fd);
    if (fd < 0 || fd > STDERR_FILENO) return;
  }
}

void require_open_files(long needed, const std::string& what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = raised.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < static_cast<rlim_t>(needed))
    fail_config("{} need about {} open files, and this process may have {} (ulimit -Hn): raise the hard limit", what, needed,
                limit.rlim_cur);
}

}  // namespace bonfire
