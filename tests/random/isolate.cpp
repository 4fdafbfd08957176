#include "tests/random/isolate.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <list>
#include <stdexcept>

#include <fmt/format.h>

namespace bonfire::cases {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than all timeouts of collectives in a case.
constexpr std::chrono::seconds longest{120};

struct Child {
  int number = 0;
  pid_t process = 0;
  int pipe = -1;
  Clock::time_point end{};
  std::string text{};
  bool stopped = false;
};

Child start(int number, const std::function<std::string(int)>& body) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("no pipe for a case");
  const pid_t process = ::fork();
  if (process < 0) throw std::runtime_error("no process for a case");
  if (process == 0) {
    ::close(ends[0]);
    const std::string text = body(number);
    for (std::size_t at = 0; at < text.size();) {
      const auto written = ::write(ends[1], text.data() + at, text.size() - at);
      if (written <= 0) ::_exit(3);
      at += static_cast<std::size_t>(written);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  return {.number = number, .process = process, .pipe = ends[0], .end = Clock::now() + longest};
}

// Reads what has come; false when the child has closed its end.
bool listen(Child& child, int milliseconds) {
  pollfd poll{.fd = child.pipe, .events = POLLIN, .revents = 0};
  if (::poll(&poll, 1, milliseconds) <= 0) {
    if (Clock::now() < child.end || child.stopped) return true;
    child.stopped = true;
    ::kill(child.process, SIGKILL);
    return true;
  }
  char buffer[4096];
  const auto count = ::read(child.pipe, buffer, sizeof buffer);
  if (count > 0) child.text.append(buffer, static_cast<std::size_t>(count));
  return count > 0;
}

std::string end(Child& child) {
  int status = 0;
  ::close(child.pipe);
  ::waitpid(child.process, &status, 0);
  if (child.stopped) return fmt::format("it did not end within {} seconds", longest.count());
  if (WIFSIGNALED(status))
    return fmt::format("the process was ended by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
  if (WEXITSTATUS(status) != 0) return fmt::format("the process ended with status {}", WEXITSTATUS(status));
  return child.text;
}

}  // namespace

std::vector<std::string> run_isolated(int count, int at_once, const std::function<std::string(int)>& body) {
  std::vector<std::string> results(static_cast<std::size_t>(count));
  std::list<Child> running;
  for (int next = 0; next < count || !running.empty();) {
    while (next < count && static_cast<int>(running.size()) < at_once) running.push_back(start(next++, body));
    for (auto child = running.begin(); child != running.end();) {
      if (listen(*child, 5)) {
        ++child;
        continue;
      }
      results[static_cast<std::size_t>(child->number)] = end(*child);
      child = running.erase(child);
    }
  }
  return results;
}

}  // namespace bonfire::cases
