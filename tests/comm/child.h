#pragma once

#include <signal.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace bonfire::test {

// A program that a test runs beside itself, with its output in a file. A variable with an empty value is unset.
class Child {
 public:
  struct Place {
    int output = -1;         // both of its streams, in place of the file
    bool own_group = false;  // a process group of its own, as a shell gives a job
  };
  explicit Child(std::vector<std::string> arguments, std::map<std::string, std::string> variables = {});
  Child(std::vector<std::string> arguments, std::map<std::string, std::string> variables, Place place);
  ~Child();  // killed where it still runs
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // The exit code, or minus the signal; the test fails where it takes longer.
  int wait(std::chrono::milliseconds most);
  bool running();
  // Both of its streams, so far.
  std::string output() const;
  // Waits until the output contains `text`; false at the limit.
  bool said(const std::string& text, std::chrono::milliseconds most = std::chrono::seconds(60));
  void send(int signal) const { kill(pid_, signal); }

 private:
  std::string file_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  int code_ = 0;
};

// Polls until it holds; false at the limit.
bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds most = std::chrono::seconds(60));

// Running processes that have `text` in their environment or arguments, other than this one.
std::vector<pid_t> processes_with(const std::string& text);

// Whether a process is no more, or only waits for its parent to hear of it.
bool has_ended(pid_t process);

// The letter of a process's state ('R', 'S', 'T', 't', 'Z'); 0: there is none.
char state_of(pid_t process);
// Processes whose parent is `parent`, with that name (15 letters at most).
std::vector<pid_t> children_of(pid_t parent, const std::string& name);

// A folder that is removed with its content.
class Folder {
 public:
  Folder();
  ~Folder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read_file(const std::string& path);

// A number that differs from run to run and is printed, so that a failure can be repeated (BONFIRE_TEST_SEED=...).
std::uint64_t random_seed();

}  // namespace bonfire::test
