#include "bonfire/comm/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

struct Pipe {
  Socket read, write;
};

Pipe make_pipe() {
  int ends[2];
  require(pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe: {}", std::strerror(errno));
  return {Socket(ends[0]), Socket(ends[1])};
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

// One write where possible: lines of different ranks must not mix.
void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0)
      text.remove_prefix(static_cast<std::size_t>(written));
    else if (errno != EINTR && errno != EAGAIN)
      return;  // nobody reads any more; the file still gets everything
  }
}

// What a child needs between fork and exec, made beforehand.
struct Birth {
  pid_t launcher;
  int out, err, null, complaint;
  char* const* argv;
  char* const* environment;
};

// Only calls that are safe between fork and exec, for the launcher may have threads.
[[noreturn]] void become(const Birth& birth) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before the line above took effect.
  if (getppid() != birth.launcher) _exit(127);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int signal = 1; signal < 32; ++signal) ::signal(signal, SIG_DFL);
  dup2(birth.null, STDIN_FILENO);
  dup2(birth.out, STDOUT_FILENO);
  dup2(birth.err, STDERR_FILENO);
  execvpe(birth.argv[0], birth.argv, birth.environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(birth.complaint, &error, sizeof error);
  _exit(127);
}

}  // namespace

RankProcess start_rank(int rank, const std::vector<std::string>& program, const Variables& variables) {
  RankProcess process;
  process.rank = rank;
  Pipe out = make_pipe(), err = make_pipe(), complaint = make_pipe();
  const Socket null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<std::string> arguments = program;
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);

  const Birth birth{getpid(), out.write.fd(), err.write.fd(), null.fd(), complaint.write.fd(), argv.data(), envp.data()};
  process.pid = fork();
  require(process.pid >= 0, "cannot start rank {}: {}", rank, std::strerror(errno));
  if (process.pid == 0) become(birth);
  setpgid(process.pid, process.pid);  // both sides do: whoever comes first

  complaint.write.close();
  int error = 0;
  ssize_t got;
  while ((got = read(complaint.read.fd(), &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (got == sizeof error) {
    waitpid(process.pid, nullptr, 0);
    fail_config("cannot run '{}': {}", program.front(), std::strerror(error));
  }
  process.out = std::move(out.read);
  process.err = std::move(err.read);
  for (const Socket* pipe : {&process.out, &process.err}) fcntl(pipe->fd(), F_SETFL, O_NONBLOCK);
  return process;
}

Guardian::Guardian() {
  Pipe pipe = make_pipe();
  pid_ = fork();
  require(pid_ >= 0, "cannot start the launcher's guardian: {}", std::strerror(errno));
  if (pid_ != 0) {
    pipe_ = std::move(pipe.write);
    return;
  }
  // A session of its own, so that a Ctrl-C meant for the launcher does not end it first.
  setsid();
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  prctl(PR_SET_NAME, "bonfire-guard");
  constexpr int kMost = 4096;
  pid_t groups[kMost];
  int count = 0;
  // Keep nothing of the launcher's open but the pipe.
  dup2(pipe.read.fd(), 3);
  for (const int fd : {0, 1, 2}) ::close(fd);
  close_range(4, ~0U, 0);
  pid_t group;
  while (true) {
    const ssize_t got = read(3, &group, sizeof group);
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof group) break;
    if (group > 0 && count < kMost) groups[count++] = group;
    for (int i = 0; group < 0 && i < count; ++i)
      if (groups[i] == -group) groups[i--] = groups[--count];
  }
  for (int i = 0; i < count; ++i) kill(-groups[i], SIGKILL);
  _exit(0);
}

Guardian::~Guardian() {
  pipe_.close();
  waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) { tell(group); }
void Guardian::forget(pid_t group) { tell(-group); }

void Guardian::tell(pid_t group) { [[maybe_unused]] const ssize_t written = write(pipe_.fd(), &group, sizeof group); }

RankOutput::RankOutput(Options options) : options_(std::move(options)) {
  if (options_.file.empty()) return;
  file_.open(options_.file, std::ios::app);
  require(file_.is_open(), "cannot write the output of a rank to '{}': {}", options_.file, std::strerror(errno));
}

void RankOutput::line(std::string_view text, int terminal) {
  if (file_.is_open()) file_ << text << '\n' << std::flush;
  last_lines_.emplace_back(text);
  if (last_lines_.size() > options_.remembered) last_lines_.pop_front();
  if (options_.echo && !options_.raw) write_all(terminal, fmt::format("{}{}\n", options_.prefix, text));
}

void RankOutput::note(std::string_view text) {
  if (file_.is_open()) file_ << text << '\n' << std::flush;
}

// A progress bar draws over itself: shown, not kept.
void RankOutput::transient(std::string_view text, int terminal) {
  if (options_.echo && !options_.raw) write_all(terminal, fmt::format("{}{}\r", options_.prefix, text));
}

bool RankOutput::take(const Socket& pipe, int terminal, std::string& unfinished) {
  constexpr std::size_t kLongestLine = 1 << 16;
  char bytes[1 << 16];
  while (true) {
    const ssize_t got = read(pipe.fd(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    const std::string_view fresh(bytes, static_cast<std::size_t>(got));
    if (options_.echo && options_.raw) write_all(terminal, fresh);
    unfinished.append(fresh);
    std::size_t start = 0, end;
    while ((end = unfinished.find_first_of("\r\n", start)) != std::string::npos) {
      const std::string_view text(unfinished.data() + start, end - start);
      const bool carriage = unfinished[end] == '\r';
      if (carriage && end + 1 == unfinished.size()) {
        // Either a progress bar or the first half of "\r\n": shown as the former, and the latter adds an empty line at most.
        transient(text, terminal);
      } else if (carriage && unfinished[end + 1] != '\n') {
        transient(text, terminal);
      } else {
        line(text, terminal);
        if (carriage) ++end;
      }
      start = end + 1;
    }
    unfinished.erase(0, start);
    if (unfinished.size() >= kLongestLine) {
      line(unfinished, terminal);
      unfinished.clear();
    }
  }
}

void RankOutput::take_all(RankProcess& process) {
  if (process.out && !take(process.out, STDOUT_FILENO, unfinished_out)) process.out.close();
  if (process.err && !take(process.err, STDERR_FILENO, unfinished_err)) process.err.close();
}

void RankOutput::finish() {
  if (!unfinished_out.empty()) line(unfinished_out, STDOUT_FILENO);
  if (!unfinished_err.empty()) line(unfinished_err, STDERR_FILENO);
  unfinished_out.clear();
  unfinished_err.clear();
}

}  // namespace bonfire
