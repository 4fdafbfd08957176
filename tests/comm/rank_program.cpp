// A training loop in miniature that can go wrong in every way the tests need. Words in the environment say how:
//   STEPS=n (default: without end), FAULT=throw|exit|segfault|abort|kill|config|skip|nap, FAULT_RANK=r, FAULT_STEP=s
//   SLOW_RANK=r (80 ms more a step), BUSY_SECONDS=x (rank 0 is busy for so long, in step 3), SKEW_RANK=r (another
//   configuration) ABSENT_RANK=r (never comes), TWICE_RANK=r (says it is rank 0)
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <ATen/ops/ones.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/launch.h"
#include "bonfire/comm/progress.h"

namespace {

using namespace std::chrono_literals;

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

std::string word(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

void go_wrong(const std::string& fault) {
  std::printf("about to %s\n", fault.c_str());
  std::fflush(stdout);
  if (fault == "throw") throw std::runtime_error("sample 42 is broken");
  if (fault == "config") bonfire::fail_config("key 'x' is 7");
  if (fault == "exit") std::_Exit(9);
  if (fault == "segfault") *static_cast<volatile int*>(nullptr) = 1;
  if (fault == "abort") std::abort();
  if (fault == "kill") kill(getpid(), SIGKILL);
  if (fault == "nap") std::this_thread::sleep_for(1000s);
}

// The addresses at which this process accepts connections: its collectives'.
std::string listening() {
  std::string addresses;
  for (int fd = 3; fd < 256; ++fd) {
    int accepts = 0;
    socklen_t length = sizeof accepts;
    sockaddr_in name{};
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) != 0 || accepts == 0) continue;
    length = sizeof name;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 || name.sin_family != AF_INET) continue;
    addresses += std::string(addresses.empty() ? "" : ", ") + inet_ntoa(name.sin_addr);
  }
  return addresses;
}

void train(bonfire::World& world) {
  std::printf("rank %d listens at %s.\n", world.rank(), listening().c_str());
  std::printf("pid %d is rank %d of %d, local %d of %d, node %d\n", getpid(), world.rank(), world.size(), world.local_rank(),
              world.local_size(), world.node());
  std::fflush(stdout);
  const int steps = number("STEPS", 1 << 30);
  const bool faulty = number("FAULT_RANK", -1) == world.rank();
  for (int step = 0; step < steps; ++step) {
    if (number("SLOW_RANK", -1) == world.rank()) std::this_thread::sleep_for(80ms);
    if (step == 3 && world.rank() == 0 && !word("BUSY_SECONDS").empty()) {
      const bonfire::ProgressBoard::Busy busy(world.progress().get(), "checkpoint");
      std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(word("BUSY_SECONDS"))));
    }
    if (faulty && step == number("FAULT_STEP", 5)) {
      go_wrong(word("FAULT"));
      if (word("FAULT") == "skip") continue;
    }
    const at::Tensor tensor = at::ones({256});
    world.group().all_reduce(tensor).wait();
    world.progress()->finish_step(step);
    if (step == 0) {
      std::printf("sum %g\n", tensor[0].item<double>());
      std::fflush(stdout);
    }
  }
  std::printf("done\n");
}

}  // namespace

int main(int argc, char** argv) {
  bonfire::JoinOptions options;
  if (number("RANK", -1) == number("ABSENT_RANK", -2)) std::this_thread::sleep_for(1000s);
  if (number("RANK", -1) == number("TWICE_RANK", -2)) options.variables["RANK"] = "0";
  options.configuration = number("RANK", -1) == number("SKEW_RANK", -2) ? "hash-b" : "hash-a";
  return bonfire::launch(argc, argv, train, options);
}
