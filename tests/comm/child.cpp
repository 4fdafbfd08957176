#include "tests/comm/child.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include "bonfire/comm/environment.h"

namespace bonfire::test {

using namespace std::chrono_literals;

namespace {

// The tests leave no key in the user's home folder.
class OwnHome : public ::testing::Environment {
 public:
  void SetUp() override { setenv("HOME", home_.path().c_str(), 1); }

 private:
  Folder home_;
};

[[maybe_unused]] const auto* const own_home = testing::AddGlobalTestEnvironment(new OwnHome);

}  // namespace

Child::Child(std::vector<std::string> arguments, std::map<std::string, std::string> variables)
    : Child(std::move(arguments), std::move(variables), Place{}) {}

Child::Child(std::vector<std::string> arguments, std::map<std::string, std::string> variables, Place place) {
  std::string name = (std::filesystem::temp_directory_path() / "bonfire-test-XXXXXX").string();
  const int fd = mkstemp(name.data());
  file_ = name;
  Variables environment = process_variables();
  for (const auto& [key, value] : variables) environment[key] = value;
  std::erase_if(environment, [&](const auto& entry) { return variables.contains(entry.first) && entry.second.empty(); });
  std::vector<std::string> entries;
  for (const auto& [key, value] : environment) entries.push_back(key + "=" + value);
  std::vector<char*> argv, envp;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  for (std::string& entry : entries) envp.push_back(entry.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    if (place.own_group) setpgid(0, 0);
    // As from a terminal, also where a shell has started the tests in the background.
    for (const int signal : {SIGINT, SIGQUIT, SIGHUP}) ::signal(signal, SIG_DFL);
    dup2(place.output >= 0 ? place.output : fd, STDOUT_FILENO);
    dup2(place.output >= 0 ? place.output : fd, STDERR_FILENO);
    close(fd);
    if (place.output > STDERR_FILENO) close(place.output);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  if (place.own_group) setpgid(pid_, pid_);  // both sides do: whoever comes first
  close(fd);
}

Child::~Child() {
  if (running()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::filesystem::remove(file_);
}

bool Child::running() {
  if (reaped_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  reaped_ = true;
  code_ = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  return false;
}

int Child::wait(std::chrono::milliseconds most) {
  EXPECT_TRUE(eventually([this] { return !running(); }, most)) << "still running; it said:\n" << output();
  return reaped_ ? code_ : -999;
}

std::string Child::output() const { return read_file(file_); }

bool Child::said(const std::string& text, std::chrono::milliseconds most) {
  const bool found = eventually([&] { return output().find(text) != std::string::npos; }, most);
  EXPECT_TRUE(found) << "not said: " << text << "\nbut:\n" << output();
  return found;
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds most) {
  const auto until = std::chrono::steady_clock::now() + most;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos || std::stoi(name) == getpid()) continue;
    // A process that has ended and waits for its parent has neither.
    const std::string words = read_file(entry.path() / "environ") + read_file(entry.path() / "cmdline");
    if (words.find(text) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

namespace {

// Of /proc/PID/stat: the name, and what follows it.
std::pair<std::string, std::string> stat_of(pid_t process) {
  const std::string stat = read_file("/proc/" + std::to_string(process) + "/stat");
  const std::size_t begin = stat.find('('), end = stat.rfind(')');
  if (begin == std::string::npos || end == std::string::npos) return {};
  return {stat.substr(begin + 1, end - begin - 1), stat.substr(end + 2)};
}

}  // namespace

char state_of(pid_t process) {
  const std::string rest = stat_of(process).second;
  return rest.empty() ? '\0' : rest.front();
}

std::vector<pid_t> children_of(pid_t parent, const std::string& name) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string number = entry.path().filename();
    if (number.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto [own_name, rest] = stat_of(std::stoi(number));
    if (own_name == name && rest.size() > 2 && std::stoi(rest.substr(2)) == parent) found.push_back(std::stoi(number));
  }
  return found;
}

bool has_ended(pid_t process) {
  const std::string folder = "/proc/" + std::to_string(process);
  const std::string stat = read_file(folder + "/stat");
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return true;
  // The first thread may have ended before the others, and the parent hears of it after the last.
  std::error_code gone;
  const std::filesystem::directory_iterator threads(folder + "/task", gone);
  return stat.substr(name_end + 2, 1) == "Z" && std::distance(begin(threads), end(threads)) <= 1;
}

Folder::Folder() {
  std::string name = (std::filesystem::temp_directory_path() / "bonfire-test-XXXXXX").string();
  path_ = mkdtemp(name.data());
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  // Of a process that has ended since then there is nothing to read, which a stream's buffer alone would throw.
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::uint64_t random_seed() {
  const char* given = std::getenv("BONFIRE_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::stoull(given) : std::random_device{}();
  std::cout << "BONFIRE_TEST_SEED=" << seed << std::endl;
  return seed;
}

}  // namespace bonfire::test
