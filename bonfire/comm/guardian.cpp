#include "bonfire/comm/guardian.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "bonfire/base/system_error.h"
#include "bonfire/comm/signal_events.h"

namespace bonfire {
namespace {

// Only calls that are safe after fork, for the launcher may have threads.
void close_from(unsigned first) {
  if (close_range(first, ~0U, 0) == 0) return;
  // A kernel older than 5.9, or a container that does not allow the call.
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  for (rlim_t fd = first; fd < limit.rlim_cur; ++fd) ::close(static_cast<int>(fd));
}

// Everything that it still watches when the launcher's end of the pipe is closed is killed.
[[noreturn]] void guard(int pipe) {
  // A session of its own, so that a Ctrl-C meant for the launcher does not end it first.
  setsid();
  prctl(PR_SET_NAME, "bonfire-guard");
  pid_t groups[Guardian::kMost];
  int count = 0;
  // Keep nothing of the launcher's open but the pipe.
  dup2(pipe, 3);
  for (const int fd : {0, 1, 2}) ::close(fd);
  close_from(4);
  pid_t group;
  while (true) {
    const ssize_t got = read(3, &group, sizeof group);
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof group) break;
    if (group > 0 && count < Guardian::kMost) groups[count++] = group;
    for (int i = 0; group < 0 && i < count; ++i)
      if (groups[i] == -group) groups[i--] = groups[--count];
  }
  for (int i = 0; i < count; ++i) kill(-groups[i], SIGKILL);
  _exit(0);
}

}  // namespace

Guardian::Guardian() { start(); }

void Guardian::start() {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
  const Socket read_end(ends[0]);
  pipe_ = Socket(ends[1]);
  const SignalsBlocked signals;  // in the child for ever
  pid_ = fork();
  require_system(pid_ >= 0, "cannot start the launcher's guardian");
  if (pid_ == 0) guard(read_end.fd());
}

Guardian::~Guardian() {
  // What it would do, done here: somebody may have stopped it, and then it would be waited for without end.
  for (const pid_t group : groups_) kill(-group, SIGKILL);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) {
  groups_.insert(group);
  tell(group);
}

void Guardian::forget(pid_t group) {
  groups_.erase(group);
  tell(-group);
}

void Guardian::tell(pid_t group) { [[maybe_unused]] const ssize_t written = write(pipe_.fd(), &group, sizeof group); }

bool Guardian::renew() {
  if (waitpid(pid_, nullptr, WNOHANG) != pid_) return false;
  start();
  for (const pid_t group : groups_) tell(group);
  return true;
}

}  // namespace bonfire
