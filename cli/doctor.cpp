#include <arpa/inet.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Version.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/environment.h"
#include "bonfire/train/config.h"
#include "cli/commands.h"

// What this machine has, and what is wrong with it.
namespace bonfire::cli {
namespace {

struct Check {
  std::string name;
  std::string value;
  std::string problem;  // one line, with what to do about it; empty: all is well
  bool fatal = false;   // nothing can be trained with it
};

// The number after `key` in a file like /proc/meminfo, or the first number of a file with one; -1: none.
std::int64_t number_in(const std::string& file, const std::string& key = "") {
  std::ifstream in(file);
  std::string word;
  while (in >> word) {
    if (!key.empty() && word != key) continue;
    std::int64_t number = -1;
    if (key.empty()) return std::isdigit(static_cast<unsigned char>(word[0])) ? std::stoll(word) : -1;
    return in >> number ? number : -1;
  }
  return -1;
}

Check check_cores(nlohmann::json& facts) {
  const int cores = usable_cores();
  facts["cores"] = cores;
  Check check{"cores", fmt::format("{} usable of {}, {}", cores, sysconf(_SC_NPROCESSORS_CONF), at::get_cpu_capability())};
  if (const double quota = cpu_quota("/proc/self/cgroup", "/sys/fs/cgroup"); quota > 0)
    check.value += fmt::format(", of which this container may use {:.1f}", quota);
  return check;
}

Check check_memory(nlohmann::json& facts) {
  const std::int64_t total = number_in("/proc/meminfo", "MemTotal:") * 1024;
  const std::int64_t free = number_in("/proc/meminfo", "MemAvailable:") * 1024;
  const std::int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  facts["memory_bytes"] = total;
  facts["memory_available_bytes"] = free;
  Check check{"memory", fmt::format("{} available of {}", format_bytes(free), format_bytes(total))};
  if (limit > 0 && limit < total) check.value += fmt::format(", this container may use {}", format_bytes(limit));
  if (free < (std::int64_t{1} << 30))
    check.problem = "less than 1 GiB is available; end other programs or train a smaller model";
  return check;
}

Check check_torch(nlohmann::json& facts) {
  facts["bonfire"] = BONFIRE_VERSION;
  facts["libtorch"] = BONFIRE_TORCH_VERSION;
  return {"versions", fmt::format("Bonfire {}, LibTorch {}", BONFIRE_VERSION, BONFIRE_TORCH_VERSION)};
}

Check check_gpus(nlohmann::json& facts) {
  facts["gpus"] = nlohmann::json::array();
  if (!gpu_available()) {
    facts["gpu_unavailable_reason"] = gpu_unavailable_reason();
    return {"GPU", "none; the CPU is used (" + gpu_unavailable_reason() + ")"};
  }
  std::string value;
  for (int i = 0; i < gpu_count(); ++i) {
    const GpuInfo gpu = gpu_info(i);
    facts["gpus"].push_back(
        {{"name", gpu.name}, {"memory_bytes", gpu.memory_bytes}, {"major", gpu.major}, {"minor", gpu.minor}});
    value += fmt::format("{}{}: {}, {}, compute capability {}.{}", value.empty() ? "" : "; ", i, gpu.name,
                         format_bytes(gpu.memory_bytes), gpu.major, gpu.minor);
  }
  return {"GPU", value};
}

// Sends one byte to itself, as the ranks of a run on this machine would.
Check check_loopback() {
  Check check{"loopback", "127.0.0.1 answers"};
  const int listener = socket(AF_INET, SOCK_STREAM, 0), sender = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  char byte = 'b';
  int receiver = -1;
  const bool works = listener >= 0 && sender >= 0 && bind(listener, where, size) == 0 && listen(listener, 1) == 0 &&
                     getsockname(listener, where, &size) == 0 && connect(sender, where, size) == 0 &&
                     (receiver = accept(listener, nullptr, nullptr)) >= 0 && send(sender, &byte, 1, 0) == 1 &&
                     recv(receiver, &byte, 1, 0) == 1;
  if (!works) {
    check.value = "127.0.0.1 does not answer";
    check.problem = fmt::format("ranks on this machine cannot meet: {}; bring the interface 'lo' up", std::strerror(errno));
    check.fatal = true;
  }
  for (const int fd : {listener, sender, receiver}) {
    if (fd >= 0) close(fd);
  }
  return check;
}

Check check_files(nlohmann::json& facts) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  facts["open_files"] = limit.rlim_cur;
  Check check{"open files", fmt::format("{} (at most {})", limit.rlim_cur, limit.rlim_max)};
  // Each pair of ranks of a group holds a socket.
  if (limit.rlim_cur < 1024) check.problem = "fewer than 1024; many ranks on one machine need more: ulimit -n 4096";
  return check;
}

Check check_shared_memory(nlohmann::json& facts) {
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) != 0) {
    return {"/dev/shm", "missing", "NCCL on several GPUs of one machine needs it; mount a tmpfs there"};
  }
  const auto free = static_cast<std::int64_t>(shm.f_bavail) * static_cast<std::int64_t>(shm.f_frsize);
  facts["shared_memory_bytes"] = free;
  Check check{"/dev/shm", format_bytes(free) + " free"};
  if (free < (std::int64_t{64} << 20) && gpu_count() > 1) {
    check.problem = "less than 64 MiB; NCCL needs more: start the container with --shm-size=1g";
  }
  return check;
}

Check check_launch(nlohmann::json& facts) {
  Check check{"launch", ""};
  try {
    const Variables variables = process_variables();
    const Environment environment = resolve_environment(variables);
    facts["launched_by"] = name_of(environment.source);
    check.value = environment.source == LaunchSource::none
                      ? "no launch environment; a run starts its own ranks"
                      : fmt::format("{}: rank {} of {}", name_of(environment.source), environment.rank, environment.size);
    check.value += fmt::format("; a single rank uses {} threads", threads_per_rank(variables, 1, usable_cores()));
  } catch (const ConfigError& error) {
    check.value = "contradictory";
    check.problem = error.what();
  }
  return check;
}

int examine(bool json) {
  nlohmann::json facts;
  const std::vector<Check> checks = {check_torch(facts),         check_cores(facts), check_memory(facts),
                                     check_gpus(facts),          check_loopback(),   check_files(facts),
                                     check_shared_memory(facts), check_launch(facts)};
  bool fatal = false;
  auto problems = nlohmann::json::array();
  for (const auto& check : checks) {
    fatal = fatal || check.fatal;
    if (!check.problem.empty()) problems.push_back(check.name + ": " + check.problem);
    if (json) continue;
    fmt::print("{:<12} {}\n", check.name, check.value);
    if (!check.problem.empty()) fmt::print("{:<12} problem: {}\n", "", check.problem);
  }
  if (json) {
    facts["ok"] = problems.empty();
    facts["problems"] = problems;
    fmt::print("{}\n", facts.dump(2));
  } else if (problems.empty()) {
    fmt::print("No problems found.\n");
  }
  return fatal ? kFailed : kDone;
}

}  // namespace

void add_doctor(CLI::App& program, int& exit_code) {
  struct Arguments {
    bool json = false;
    bool config_reference = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("doctor", "Report what this machine has, and any problems");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->add_flag("--config-reference", arguments->config_reference,
                    "Print the reference of the configuration file, as Markdown");
  command->callback([arguments, &exit_code] {
    if (arguments->config_reference) {
      fmt::print("{}", config_reference());
      exit_code = kDone;
    } else {
      exit_code = examine(arguments->json);
    }
  });
}

}  // namespace bonfire::cli
