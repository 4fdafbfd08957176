// How long the network may be silent: as long as a rank may.
#include "bonfire/comm/keep_alive.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <vector>

#include <gtest/gtest.h>

#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::keep_alive_test {
namespace {

using namespace std::chrono_literals;
using test::Child;

TEST(KeepAlive, GivesUpAfterTheSilence) {
  std::vector<std::int64_t> limits = {3600, 86400, 1'000'000};
  for (std::int64_t seconds = 1; seconds < 400; ++seconds) limits.push_back(seconds);
  for (const std::int64_t seconds : limits) {
    const KeepAlive times = keep_alive_of(std::chrono::seconds(seconds));
    const std::int64_t all = times.idle + std::int64_t{times.interval} * times.probes;
    EXPECT_GE(all, seconds);
    EXPECT_LE(all, seconds + times.interval) << seconds;
    EXPECT_GE(times.idle, 1) << seconds;
    EXPECT_GE(times.interval, 1) << seconds;
    EXPECT_GE(times.probes, 1) << seconds;
    // A packet or two may be lost.
    EXPECT_GE(times.probes, std::min<std::int64_t>(3, seconds / 4 + 1)) << seconds;
  }
  EXPECT_EQ(keep_alive_of(1500ms), keep_alive_of(2s));
}

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  return getsockopt(fd, level, name, &value, &length) == 0 ? value : -1;
}

// What the kernel was told about the connections that this process has accepted at a port.
std::vector<std::optional<KeepAlive>> accepted_at(int port) {
  std::vector<std::optional<KeepAlive>> found;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in name{};
    socklen_t length = sizeof name;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 || name.sin_family != AF_INET ||
        ntohs(name.sin_port) != port || option(fd, SOL_SOCKET, SO_ACCEPTCONN) != 0)
      continue;
    if (option(fd, SOL_SOCKET, SO_KEEPALIVE) == 0)
      found.push_back(std::nullopt);
    else
      found.push_back(KeepAlive{option(fd, IPPROTO_TCP, TCP_KEEPIDLE), option(fd, IPPROTO_TCP, TCP_KEEPINTVL),
                                option(fd, IPPROTO_TCP, TCP_KEEPCNT)});
  }
  return found;
}

TEST(KeepAlive, AStoresConnectionsHaveItsOwn) {
  const auto told_for = [](std::chrono::milliseconds silence) {
    const StoreServer server({.token = "t", .silence = silence, .log = Log::silent()});
    StoreClient client({.server = server.endpoint(), .token = "t"});
    client.set("key", "value");
    return accepted_at(server.endpoint().port);
  };
  using All = std::vector<std::optional<KeepAlive>>;
  EXPECT_EQ(told_for(30s), All{keep_alive_of(30s)});
  EXPECT_EQ(told_for(300s), All{keep_alive_of(300s)});
  EXPECT_EQ(told_for(0s), All{std::nullopt});
}

// After how many seconds the kernel will ask for the peers of connections that were accepted at a port of this machine.
std::vector<double> asked_after(int port) {
  std::ifstream table("/proc/net/tcp");
  std::vector<double> found;
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number, local, peer, state, queues, timer;
    words >> number >> local >> peer >> state >> queues >> timer;
    constexpr const char *kEstablished = "01", *kKeepAlive = "02:";
    if (std::stoi(local.substr(local.find(':') + 1), nullptr, 16) != port || state != kEstablished) continue;
    if (timer.starts_with(kKeepAlive)) found.push_back(std::stol(timer.substr(3), nullptr, 16) / 100.0);
  }
  return found;
}

// Whoever hosts the store, what the user has said counts there too.
class HostedStore : public ::testing::TestWithParam<bool> {
 protected:
  // Two ranks that meet at `port`, until they have.
  void start(const testing::Port& port, const std::string& limit) {
    std::map<std::string, std::string> variables = {{"BONFIRE_HEARTBEAT_TIMEOUT", limit}, {"BONFIRE_STALL_TIMEOUT", "1000"}};
    if (GetParam()) {
      runs_.push_back(std::make_unique<Child>(test::launch(2, {"--port", port.number()}), variables));
    } else {
      for (const char* rank : {"0", "1"}) {
        variables.insert(
            {{"MASTER_PORT", port.number()}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
        variables["OMPI_COMM_WORLD_RANK"] = variables["OMPI_COMM_WORLD_LOCAL_RANK"] = rank;
        runs_.push_back(std::make_unique<Child>(std::vector<std::string>{test::kProgram}, variables));
      }
    }
    for (const auto& run : runs_) ASSERT_TRUE(run->said("sum 2"));
  }

  std::vector<std::unique_ptr<Child>> runs_;
};

TEST_P(HostedStore, AsksAsLateAsTheHeartbeatLimitAllows) {
  const testing::Port port;
  start(port, "300");
  const int number = std::stoi(port.number());
  EXPECT_TRUE(test::eventually([&] {
    for (const double seconds : asked_after(number))
      if (seconds > 60) return true;
    return false;
  })) << "of "
      << asked_after(number).size();
}

TEST_P(HostedStore, AsksForNobodyWithoutOne) {
  const testing::Port port;
  start(port, "0");
  EXPECT_TRUE(asked_after(std::stoi(port.number())).empty());
}

INSTANTIATE_TEST_SUITE_P(KeepAlive, HostedStore, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AtTheLauncher" : "AtRankZero"; });

}  // namespace
}  // namespace bonfire::keep_alive_test
