// Every way in which real ranks become a World.
#include <cstdlib>
#include <fstream>
#include <optional>
#include <random>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/socket.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::join_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::expect_all_done;
using test::kProgram;
using test::launch;
using Variables = std::map<std::string, std::string>;

TEST(Join, Alone) {
  Child run({kProgram}, {{"STEPS", "3"}});
  expect_all_done(run, 1);
}

TEST(Join, UnderOurLauncher) {
  Child run(launch(3), {{"STEPS", "20"}});
  expect_all_done(run, 3);
}

TEST(Join, StartsItselfWhenAskedTo) {
  Child argument({kProgram, "--ranks", "2"}, {{"STEPS", "3"}});
  expect_all_done(argument, 2);
  Child variable({kProgram}, {{"STEPS", "3"}, {"BONFIRE_RANKS", "2"}});
  expect_all_done(variable, 2);
  Child nonsense({kProgram, "--ranks=many"});
  EXPECT_EQ(nonsense.wait(60s), 2);
  EXPECT_TRUE(contains(nonsense.output(), "--ranks is 'many'")) << nonsense.output();
}

TEST(Join, OverTwoNodes) {
  const testing::Port port("127.0.0.2");
  const auto node = [&](const std::string& number) {
    const std::string address = number == "0" ? "127.0.0.2" : "127.0.0.3";
    return launch(2,
                  {"--nodes", "2", "--node-rank", number, "--master", "127.0.0.2:" + port.number(), "--address", address});
  };
  Child zero(node("0"), {{"STEPS", "5"}}), one(node("1"), {{"STEPS", "5"}});
  EXPECT_EQ(zero.wait(30s), 0) << zero.output();
  EXPECT_EQ(one.wait(30s), 0) << one.output();
  EXPECT_TRUE(contains(one.output(), "is rank 3 of 4, local 1 of 2, node 1")) << one.output();
  EXPECT_TRUE(contains(one.output(), "sum 4")) << one.output();
  for (int rank = 0; rank < 4; ++rank) {
    const std::string output = rank < 2 ? zero.output() : one.output();
    EXPECT_TRUE(contains(output, fmt::format("rank {} listens at 127.0.0.{}.\n", rank, rank < 2 ? 2 : 3))) << output;
  }
}

TEST(Join, AnAddressOfAnotherMachineIsRefused) {
  Child run(launch(1, {"--address", "203.0.113.7"}));
  EXPECT_EQ(run.wait(60s), 2);
  EXPECT_TRUE(contains(run.output(), "address '203.0.113.7' is not one of this machine")) << run.output();
}

// Debian writes a machine's own name into /etc/hosts as 127.0.1.1, where no other machine finds it. Each child sees a hosts
// file of its own; to the other node the name is the machine's real address.
class JoinByName : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("unshare --map-root-user --mount true 2> /dev/null") != 0) GTEST_SKIP() << "unshare is not permitted";
    try {
      real_ = address_towards("203.0.113.1");
    } catch (const Error& error) {
      GTEST_SKIP() << "this machine has no address but loopback: " << error.what();
    }
    port_.emplace(real_);
  }

  std::vector<std::string> knowing_zero_as(const std::string& address, std::vector<std::string> words) const {
    const std::string file = folder_.path() + "/" + address;
    std::ofstream(file) << "127.0.0.1 localhost\n" << address << " bonfire-zero\n";
    words.insert(words.begin(), {"unshare", "--map-root-user", "--mount", "sh", "-c",
                                 "mount --bind '" + file + "' /etc/hosts && exec \"$@\"", "sh"});
    return words;
  }

  void expect_joined(Child& zero, Child& one) const {
    EXPECT_EQ(zero.wait(30s), 0) << zero.output();
    EXPECT_EQ(one.wait(30s), 0) << one.output();
    for (int rank = 0; rank < 2; ++rank) {
      const std::string output = rank == 0 ? zero.output() : one.output();
      EXPECT_TRUE(contains(output, "sum 2")) << output;
      EXPECT_TRUE(contains(output, fmt::format("rank {} listens at {}", rank, real_))) << output;
      EXPECT_FALSE(contains(output, "listens at 127.")) << output;
    }
  }

  std::string real_;
  std::optional<testing::Port> port_;
  test::Folder folder_;
};

TEST_F(JoinByName, OurLaunchersMeet) {
  const auto node = [&](const char* number) {
    return launch(1, {"--nodes", "2", "--node-rank", number, "--master", "bonfire-zero:" + port_->number()});
  };
  const Variables variables = {{"STEPS", "3"}, {"BONFIRE_TOKEN", "a secret"}, {"BONFIRE_RENDEZVOUS_TIMEOUT", "20"}};
  Child zero(knowing_zero_as("127.0.1.1", node("0")), variables), one(knowing_zero_as(real_, node("1")), variables);
  expect_joined(zero, one);
}

TEST_F(JoinByName, RanksOfSlurmMeet) {
  const auto task = [&](const char* number) {
    return Variables{{"SLURM_PROCID", number},
                     {"SLURM_NTASKS", "2"},
                     {"SLURM_LOCALID", "0"},
                     {"SLURM_NTASKS_PER_NODE", "1"},
                     {"SLURM_NODEID", number},
                     {"SLURM_JOB_NODELIST", "bonfire-zero,bonfire-one"},
                     {"SLURM_JOB_ID", "1"},
                     {"MASTER_PORT", port_->number()},
                     {"BONFIRE_TOKEN", "a secret"},
                     {"BONFIRE_RENDEZVOUS_TIMEOUT", "20"},
                     {"STEPS", "3"}};
  };
  Child zero(knowing_zero_as("127.0.1.1", {kProgram}), task("0")), one(knowing_zero_as(real_, {kProgram}), task("1"));
  expect_joined(zero, one);
}

// Kubeflow's variables: one process a node, each its own launcher.
TEST(Join, UnderKubeflow) {
  const testing::Port port("127.0.0.3");
  const auto pod = [&](const char* rank) {
    return Variables{{"PET_NNODES", "2"},
                     {"PET_NPROC_PER_NODE", "1"},
                     {"PET_NODE_RANK", rank},
                     {"PET_MASTER_ADDR", "127.0.0.3"},
                     {"PET_MASTER_PORT", port.number()},
                     {"BONFIRE_TOKEN", "a secret"},
                     {"STEPS", "3"}};
  };
  Child zero({kProgram}, pod("0")), one({kProgram}, pod("1"));
  EXPECT_EQ(zero.wait(30s), 0) << zero.output();
  EXPECT_EQ(one.wait(30s), 0) << one.output();
  EXPECT_TRUE(contains(one.output(), "is rank 1 of 2, local 0 of 1, node 1")) << one.output();
}

// Slurm's variables: no launcher of ours, rank 0 hosts the store.
Variables slurm(int rank, int size, const std::string& job) {
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NTASKS", std::to_string(size)},
          {"SLURM_LOCALID", std::to_string(rank)},
          {"SLURM_NTASKS_PER_NODE", std::to_string(size)},
          {"SLURM_NODEID", "0"},
          {"SLURM_JOB_NODELIST", "localhost"},
          {"SLURM_JOB_ID", job},
          {"STEPS", "5"}};
}

std::string random_job() { return std::to_string(1000000 + Random(std::random_device{}()).below(0, 9999)); }

TEST(Join, UnderSlurmsVariables) {
  const std::string job = random_job();
  // The one that hosts comes last.
  Child one({kProgram}, slurm(1, 2, job)), zero({kProgram}, slurm(0, 2, job));
  EXPECT_EQ(zero.wait(30s), 0) << zero.output();
  EXPECT_EQ(one.wait(30s), 0) << one.output();
  EXPECT_TRUE(contains(one.output(), "sum 2")) << one.output();
}

}  // namespace
}  // namespace bonfire::join_test
