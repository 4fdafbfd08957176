#include "bonfire/comm/cores.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// "max 100000", "150000 100000". 0: none.
double quota_v2(const fs::path& folder) {
  std::string quota;
  double period = 0;
  std::ifstream file(folder / "cpu.max");
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double quota_v1(const fs::path& folder) {
  double quota = 0, period = 0;
  std::ifstream(folder / "cpu.cfs_quota_us") >> quota;
  std::ifstream(folder / "cpu.cfs_period_us") >> period;
  return quota > 0 && period > 0 ? quota / period : 0;
}

// The smallest from `path` up to the top. A container may see its own group as the top, though its path names more.
double smallest(const fs::path& top, fs::path path, double (*quota_of)(const fs::path&)) {
  double least = 0;
  while (true) {
    const double quota = quota_of(top / path);
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
    if (path.empty()) return least;
    path = path.parent_path();
  }
}

bool lists_cpu(const std::string& controllers) {
  std::istringstream list(controllers);
  for (std::string name; std::getline(list, name, ',');)
    if (name == "cpu") return true;
  return false;
}

}  // namespace

double cpu_quota(const std::string& own, const std::string& root) {
  std::ifstream file(own);
  double least = 0;
  // "0::/user.slice" (v2), "4:cpu,cpuacct:/docker/abc" (v1).
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path path = fs::path(line.substr(second + 1)).relative_path();
    double quota = 0;
    if (controllers.empty()) quota = smallest(root, path, quota_v2);
    if (lists_cpu(controllers)) {
      // The folder has the name of all controllers together, and usually a link of the one's own.
      for (const std::string& folder : {controllers, std::string("cpu")})
        if (quota == 0) quota = smallest(fs::path(root) / folder, path, quota_v1);
    }
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
  }
  return least;
}

int usable_cores() {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const double quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup");
  return quota > 0 ? std::clamp(static_cast<int>(std::ceil(quota)), 1, cores) : cores;
}

}  // namespace bonfire
