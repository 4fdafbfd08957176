// A training loop in miniature that can go wrong in every way the tests need. Words in the environment say how:
//   STEPS=n (default: without end), ENDLESS_ATTEMPTS=k (so many without end before), ELEMENTS=n (of a collective)
//   DEVICE=gpu (default: the CPU), END_FILE=f (all end in the step in which rank 0 finds it)
//   FAULT=throw|torch|exit|segfault|abort|terminate|kill|config|fade|skip|nap|shape|dtype|kind, FAULT_RANK=r, FAULT_STEP=s
//   (otherwise when SIGUSR1 comes), SLOW_RANK=r (80 ms more a step from SLOW_STEP on), BUSY_SECONDS=x (rank 0 is busy for so
//   long, in step 3), SKEW_RANK=r (another configuration) ABSENT_RANK=r (never comes), TWICE_RANK=r (says it is rank 0)
//   DEBUG_MODE=1 (compare fingerprints; each step then has a collective with one element more)
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

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

volatile std::sig_atomic_t asked_to_go_wrong = 0;

void go_wrong(const std::string& fault) {
  std::printf("about to %s\n", fault.c_str());
  if (fault == "throw") throw std::runtime_error("sample 42 is broken");
  if (fault == "torch") C10_THROW_ERROR(ValueError, "libtorch has a stack");
  if (fault == "config") bonfire::fail_config("key 'x' is 7");
  if (fault == "exit") std::_Exit(9);
  if (fault == "segfault") *static_cast<volatile int*>(nullptr) = 1;
  if (fault == "abort") std::abort();
  if (fault == "kill") kill(getpid(), SIGKILL);
  if (fault == "fade") {
    // The others lose it well before it has ended.
    sockaddr_storage peer;
    for (int fd = 3; fd < 1024; ++fd) {
      socklen_t size = sizeof peer;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0) shutdown(fd, SHUT_RDWR);
    }
    std::this_thread::sleep_for(600ms);
    std::_Exit(9);
  }
  if (fault == "nap") std::this_thread::sleep_for(1000s);
  if (fault == "terminate") {
    // As NCCL's watchdog does when it has lost another rank.
    std::thread([] { C10_THROW_ERROR(DistNetworkError, "lost a rank"); }).detach();
    std::this_thread::sleep_for(1000s);
  }
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

// One collective; `fault` says how it differs from that of the other ranks.
void communicate(bonfire::World& world, std::int64_t elements, const std::string& fault) {
  const at::Tensor tensor = at::ones({elements + (fault == "shape" ? 1 : 0)},
                                     at::TensorOptions(fault == "dtype" ? at::kDouble : at::kFloat).device(world.device()));
  if (fault == "kind")
    world.group().broadcast(tensor, 0).wait();
  else
    world.group().all_reduce(tensor).wait();
  static bool said = false;
  if (!said) std::printf("sum %g\n", tensor[0].item<double>());
  said = true;
}

void train(bonfire::World& world) {
  std::printf("rank %d listens at %s.\n", world.rank(), listening().c_str());
  std::printf("pid %d is rank %d of %d, local %d of %d, node %d\n", getpid(), world.rank(), world.size(), world.local_rank(),
              world.local_size(), world.node());
  const bool endless = number("TORCHELASTIC_RESTART_COUNT", 0) < number("ENDLESS_ATTEMPTS", 0);
  const int steps = endless ? 1 << 30 : number("STEPS", 1 << 30);
  const int elements = number("ELEMENTS", 256);
  const bool debug = number("DEBUG_MODE", 0) != 0;
  const std::string end_file = word("END_FILE");
  const bool faulty = number("FAULT_RANK", -1) == world.rank();
  for (int step = 0; step < steps; ++step) {
    if (number("SLOW_RANK", -1) == world.rank() && step >= number("SLOW_STEP", 0)) std::this_thread::sleep_for(80ms);
    if (step == 3 && world.rank() == 0 && !word("BUSY_SECONDS").empty()) {
      const bonfire::ProgressBoard::Busy busy(world.progress().get(), "checkpoint");
      std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(word("BUSY_SECONDS"))));
    }
    const bool now = faulty && (asked_to_go_wrong != 0 || step == number("FAULT_STEP", -1));
    const std::string fault = now ? word("FAULT") : "";
    if (now) go_wrong(fault);
    if (fault == "skip") continue;
    communicate(world, elements + (debug ? step : 0), fault);
    world.progress()->finish_step(step);
    if (!end_file.empty() && world.group().max(world.rank() == 0 && access(end_file.c_str(), F_OK) == 0 ? 1 : 0) > 0) break;
  }
  std::printf("done\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGUSR1, [](int) { asked_to_go_wrong = 1; });
  bonfire::JoinOptions options;
  options.world.debug = number("DEBUG_MODE", 0) != 0;
  if (word("DEVICE") != "gpu") options.device = [](const bonfire::Environment&) { return c10::Device(c10::kCPU); };
  if (number("RANK", -1) == number("ABSENT_RANK", -2)) std::this_thread::sleep_for(1000s);
  if (number("RANK", -1) == number("TWICE_RANK", -2)) options.variables["RANK"] = "0";
  options.configuration = number("RANK", -1) == number("SKEW_RANK", -2) ? "hash-b" : "hash-a";
  return bonfire::launch(argc, argv, train, options);
}
