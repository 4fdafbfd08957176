#include "bonfire/comm/descriptors.h"

#include <fcntl.h>
#include <unistd.h>

namespace bonfire {

void keep_standard_streams() {
  while (true) {
    const int fd = open("/dev/null", O_RDWR);
    if (fd > STDERR_FILENO) ::close(fd);
    if (fd < 0 || fd > STDERR_FILENO) return;
  }
}

}  // namespace bonfire
