#include "tests/support/gpu_ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"

namespace bonfire::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* rank_variable = "BONFIRE_TEST_GPU_RANK";
constexpr const char* folder_variable = "BONFIRE_TEST_GPU_FOLDER";

std::string current_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return fmt::format("{}.{}", test->test_suite_name(), test->name());
}

void run_as_rank(int rank, int ranks, const std::function<void(World&)>& body) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank % gpu_count()));
  set_current(device);
  auto store = c10::make_intrusive<c10d::FileStore>(std::string(std::getenv(folder_variable)) + "/store", ranks);
  World world = World::from_store(
      store, rank, ranks, {.device = device, .timeout = std::chrono::seconds(60), .local_rank = rank, .local_size = ranks});
  const char* repeats = std::getenv("BONFIRE_TEST_REPEATS");
  for (int left = repeats ? std::atoi(repeats) : 1; left > 0; --left) body(world);
}

pid_t spawn(const std::string& folder, int rank) {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
  environment.push_back(fmt::format("{}={}", rank_variable, rank));
  environment.push_back(fmt::format("{}={}", folder_variable, folder));
  std::vector<char*> pointers;
  for (auto& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);

  std::string program = fs::read_symlink("/proc/self/exe"), filter = "--gtest_filter=" + current_test();
  char* arguments[] = {program.data(), filter.data(), nullptr};
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, fmt::format("{}/rank {}", folder, rank).c_str(),
                                   O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int error = posix_spawn(&child, program.c_str(), &files, nullptr, arguments, pointers.data());
  posix_spawn_file_actions_destroy(&files);
  require(error == 0, "cannot start {}: error {}", program, error);
  return child;
}

}  // namespace

fs::path folder_of_gpu_ranks() {
  const char* folder = std::getenv(folder_variable);
  require(folder != nullptr, "there are no ranks of a GPU test in this process");
  const auto all = fs::path(folder) / "all";
  fs::create_directories(all);
  return all;
}

void run_gpu_ranks(int ranks, const std::function<void(World&)>& body) {
  if (const char* rank = std::getenv(rank_variable)) return run_as_rank(std::stoi(rank), ranks, body);

  std::string folder = fs::temp_directory_path() / "bonfire-gpu-XXXXXX";
  require(mkdtemp(folder.data()) != nullptr, "cannot make {}", folder);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) children.push_back(spawn(folder, rank));
  bool failed = false;
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    const auto at = std::find(children.begin(), children.end(), ended);
    if (at == children.end() || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    // The first to end is not always the first to fail: one that has failed may wait for the others in its destructors.
    if (!std::exchange(failed, true)) {
      std::ostringstream words;
      for (int rank = 0; rank < ranks; ++rank) {
        words << "\nrank " << rank << " of " << ranks << ":\n";
        words << std::ifstream(fmt::format("{}/rank {}", folder, rank)).rdbuf();
      }
      ADD_FAILURE() << "rank " << at - children.begin() << " ended first, with status " << status << words.str();
      for (const pid_t child : children)
        if (child != ended) kill(child, SIGKILL);
    }
  }
  fs::remove_all(folder);
}

}  // namespace bonfire::testing
