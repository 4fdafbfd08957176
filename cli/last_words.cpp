#include "cli/last_words.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace bonfire::cli {

void say_last(std::string_view words) {
  constexpr int patience_ms = 3000;
  while (!words.empty()) {
    pollfd entry{STDERR_FILENO, POLLOUT, 0};
    const int ready = poll(&entry, 1, patience_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return;
    // Not by stdio: a thread of the launcher may still hang there, in front of the same reader. A pipe that is ready has
    // room for so much.
    const ssize_t written = write(STDERR_FILENO, words.data(), std::min<std::size_t>(words.size(), PIPE_BUF));
    if (written >= 0)
      words.remove_prefix(static_cast<std::size_t>(written));
    else if (errno != EINTR && errno != EAGAIN)
      return;
  }
}

}  // namespace bonfire::cli
