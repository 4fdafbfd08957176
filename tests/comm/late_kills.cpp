// Preloaded into a program: says when it ends whether it has killed process groups while their numbers were theirs, which is
// until their first process has been waited for.
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace {

struct Numbers {
  std::array<pid_t, 1024> all{};
  std::size_t count = 0;
  bool has(pid_t number) const { return std::find(all.begin(), all.begin() + count, number) != all.begin() + count; }
  void add(pid_t number) {
    if (!has(number) && count < all.size()) all[count++] = number;
  }
};

Numbers killed, waited_for;
int behind = 0;

__attribute__((constructor)) void begin() { unsetenv("LD_PRELOAD"); }  // for this program alone
__attribute__((destructor)) void end() {
  fprintf(stderr, "groups of %zu processes were killed before they were waited for, %d behind\n", killed.count, behind);
}

}  // namespace

extern "C" int kill(pid_t process, int signal) noexcept {
  static const auto next = reinterpret_cast<int (*)(pid_t, int)>(dlsym(RTLD_NEXT, "kill"));
  if (process < 0 && waited_for.has(-process))
    ++behind;
  else if (process < 0 && signal == SIGKILL)
    killed.add(-process);
  return next(process, signal);
}

extern "C" int waitid(idtype_t type, id_t id, siginfo_t* how, int options) {
  static const auto next = reinterpret_cast<int (*)(idtype_t, id_t, siginfo_t*, int)>(dlsym(RTLD_NEXT, "waitid"));
  const int result = next(type, id, how, options);
  if (result == 0 && how->si_pid != 0 && (options & WEXITED) != 0 && (options & WNOWAIT) == 0) waited_for.add(how->si_pid);
  return result;
}

extern "C" pid_t waitpid(pid_t process, int* status, int options) {
  static const auto next = reinterpret_cast<pid_t (*)(pid_t, int*, int)>(dlsym(RTLD_NEXT, "waitpid"));
  int how = 0;
  const pid_t result = next(process, &how, options);
  if (result > 0 && (WIFEXITED(how) || WIFSIGNALED(how))) waited_for.add(result);
  if (status != nullptr) *status = how;
  return result;
}
