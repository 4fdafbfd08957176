#include "bonfire/comm/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "bonfire/base/system_error.h"
#include "bonfire/comm/signal_events.h"
#include "bonfire/comm/stop_signals.h"

namespace bonfire {
namespace {

struct Pipe {
  Socket read, write;
};

Pipe make_pipe() {
  int ends[2];
  require_system(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe");
  return {Socket(ends[0]), Socket(ends[1])};
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

// What a child needs between fork and exec, made beforehand.
struct Birth {
  pid_t launcher;
  int out, err, null, complaint;
  char* const* argv;
  char* const* environment;
  const sigset_t* ignored;
  const sigset_t* blocked;
};

// Only calls that are safe between fork and exec, for the launcher may have threads.
[[noreturn]] void become(const Birth& birth) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before the line above took effect.
  if (getppid() != birth.launcher) _exit(127);
  for (int signal = 1; signal < 32; ++signal) ::signal(signal, sigismember(birth.ignored, signal) ? SIG_IGN : SIG_DFL);
  sigprocmask(SIG_SETMASK, birth.blocked, nullptr);
  dup2(birth.null, STDIN_FILENO);
  dup2(birth.out, STDOUT_FILENO);
  dup2(birth.err, STDERR_FILENO);
  execvpe(birth.argv[0], birth.argv, birth.environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(birth.complaint, &error, sizeof error);
  _exit(127);
}

pid_t fork_rank(const Birth& birth) {
  // The launcher's handlers must not run in the child.
  const SignalsBlocked signals;
  const pid_t pid = fork();
  if (pid == 0) become(birth);
  return pid;
}

}  // namespace

RankProcess start_rank(int rank, const RankProgram& program) {
  RankProcess process;
  process.rank = rank;
  Pipe out = make_pipe(), err = make_pipe(), complaint = make_pipe();
  const Socket null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<std::string> arguments = program.words;
  std::vector<std::string> environment;
  for (const auto& [name, value] : program.variables) environment.push_back(name + "=" + value);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);

  sigset_t blocked;
  sigemptyset(&blocked);
  if (program.takes_signals) blocked = stop_requests();
  process.pid = fork_rank({getpid(), out.write.fd(), err.write.fd(), null.fd(), complaint.write.fd(), argv.data(),
                           envp.data(), &program.ignored, &blocked});
  require_system(process.pid >= 0, "cannot start rank {}", rank);
  setpgid(process.pid, process.pid);  // both sides do: whoever comes first

  complaint.write.close();
  int error = 0;
  ssize_t got;
  while ((got = read(complaint.read.fd(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (got == sizeof error) {
    waitpid(process.pid, nullptr, 0);
    fail_config("cannot run '{}': {}", program.words.front(), std::strerror(error));
  }
  process.out = std::move(out.read);
  process.err = std::move(err.read);
  for (const Socket* pipe : {&process.out, &process.err}) fcntl(pipe->fd(), F_SETFL, O_NONBLOCK);
  process.end = Socket(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  return process;
}

std::string held_by(pid_t process) {
  std::ifstream status(fmt::format("/proc/{}/status", process));
  bool stopped = false;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("State:")) stopped = line.find("tracing stop") != std::string::npos;
    if (!stopped || !line.starts_with("TracerPid:")) continue;
    const std::size_t digits = line.find_first_of("123456789");
    return digits == std::string::npos ? "" : fmt::format("a debugger (process {})", line.substr(digits));
  }
  return {};
}

}  // namespace bonfire
