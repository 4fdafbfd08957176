// Inside what others have started: mpirun, Slurm, torchrun's agent, an existing process group.
#include <cstdlib>
#include <thread>

#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "bonfire/comm/join.h"
#include "bonfire/comm/world.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::foreign_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::kProgram;

const std::map<std::string, std::string> kAsRoot = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                    {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                                    {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"}};

std::vector<std::string> mpirun(int ranks, std::vector<std::string> program) {
  std::vector<std::string> words = {"mpirun", "--oversubscribe", "-n", std::to_string(ranks)};
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

#define SKIP_WITHOUT(tool) \
  if (std::system("command -v " tool " > /dev/null") != 0) GTEST_SKIP() << tool " is not installed"

TEST(Foreign, UnderMpirunByItsVariables) {
  SKIP_WITHOUT("mpirun");
  const testing::Port port;
  auto variables = kAsRoot;
  variables["MASTER_PORT"] = port.number();
  variables["STEPS"] = "5";
  Child run(mpirun(2, {kProgram}), variables);
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(contains(run.output(), "is rank 1 of 2, local 1 of 2")) << run.output();
  EXPECT_TRUE(contains(run.output(), "sum 2")) << run.output();
}

TEST(Foreign, MpirunWithoutAPortIsRefusedByName) {
  SKIP_WITHOUT("mpirun");
  Child run(mpirun(2, {kProgram}), kAsRoot);
  EXPECT_NE(run.wait(60s), 0);
  EXPECT_TRUE(contains(run.output(), "MASTER_PORT is not set")) << run.output();
}

TEST(Foreign, UnderMpichsMpiexec) {
  SKIP_WITHOUT("mpiexec.hydra");
  const testing::Port port;
  Child run({"mpiexec.hydra", "-n", "2", kProgram}, {{"MASTER_PORT", port.number()}, {"STEPS", "5"}});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_TRUE(contains(run.output(), fmt::format("is rank {0} of 2, local {0} of 2, node 0", rank))) << run.output();
  EXPECT_TRUE(contains(run.output(), "sum 2")) << run.output();
}

TEST(Foreign, MpiexecWithoutAPortIsRefusedByName) {
  SKIP_WITHOUT("mpiexec.hydra");
  Child run({"mpiexec.hydra", "-n", "2", kProgram});
  EXPECT_NE(run.wait(60s), 0);
  EXPECT_TRUE(contains(run.output(), "MASTER_PORT is not set, but PMI_RANK is")) << run.output();
}

TEST(Foreign, InsideAnMpiProgram) {
#ifdef MPI_PROGRAM
  SKIP_WITHOUT("mpirun");
  Child run(mpirun(3, {MPI_PROGRAM}), kAsRoot);
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_TRUE(
        contains(run.output(), fmt::format("MPI's {0} is rank {1} of 3, local {1} of 3, node 0, sum 3", rank, 2 - rank)))
        << run.output();
#else
  GTEST_SKIP() << "no MPI was found";
#endif
}

TEST(Foreign, UnderSlurm) {
  Child run({BONFIRE_SOURCE_DIR "/tests/comm/one_node_slurm.sh", "2", kProgram}, {{"STEPS", "5"}});
  const int code = run.wait(120s);
  if (code == 77) GTEST_SKIP() << run.output();
  EXPECT_EQ(code, 0) << run.output();
  EXPECT_TRUE(contains(run.output(), "is rank 0 of 2, local 0 of 2, node 0")) << run.output();
  EXPECT_TRUE(contains(run.output(), "is rank 1 of 2, local 1 of 2, node 0")) << run.output();
  EXPECT_TRUE(contains(run.output(), "1: sum 2")) << run.output();
}

// What torchrun's agent does: it hosts a TCPStore that has had other attempts before.
TEST(Foreign, UnderAnAgentsStore) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  for (const char* attempt : {"0", "1"}) {
    const auto variables = [&](const char* rank) {
      return std::map<std::string, std::string>{{"RANK", rank},
                                                {"WORLD_SIZE", "2"},
                                                {"LOCAL_RANK", rank},
                                                {"LOCAL_WORLD_SIZE", "2"},
                                                {"GROUP_RANK", "0"},
                                                {"MASTER_ADDR", "127.0.0.1"},
                                                {"MASTER_PORT", std::to_string(agent->getPort())},
                                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                {"TORCHELASTIC_RESTART_COUNT", attempt},
                                                {"TORCHELASTIC_RUN_ID", "job"},
                                                {"STEPS", "5"}};
    };
    Child zero({kProgram}, variables("0")), one({kProgram}, variables("1"));
    EXPECT_EQ(zero.wait(30s), 0) << zero.output();
    EXPECT_EQ(one.wait(30s), 0) << one.output();
    EXPECT_TRUE(contains(one.output(), "sum 2")) << one.output();
  }
}

// Ranks as threads of this process.
void as_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

TEST(Foreign, FromAProcessGroup) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  as_ranks(4, [&](int rank) {
    auto options = c10d::ProcessGroupGloo::Options::create();
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    const auto theirs = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>("theirs", store),
                                                                    rank, 4, options);
    const World world = World::from_process_group(theirs, c10::make_intrusive<c10d::PrefixStore>("ours", store));
    EXPECT_EQ(world.rank(), rank);
    const at::Tensor all = at::full({3}, rank + 1.0);
    world.group().all_reduce(all).wait();
    EXPECT_EQ(all[0].item<double>(), 10);
    // Smaller groups connect through the store.
    const Mesh mesh = world.mesh({.replicate = 2, .shard = 2});
    const at::Tensor some = at::full({3}, rank + 1.0);
    mesh.group(Axis::shard).all_reduce(some).wait();
    EXPECT_EQ(some[0].item<double>(), rank < 2 ? 3 : 7);
    // Theirs still works.
    std::vector<at::Tensor> tensors = {at::full({1}, 1.0)};
    theirs->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0][0].item<double>(), 4);
  });
}

TEST(Foreign, FromAStoreWithCheckIn) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  as_ranks(3, [&](int rank) {
    Environment place;
    place.rank = rank;
    place.size = 3;
    place.local_rank = rank;
    place.local_size = 3;
    const World world = world_from_store(store, place, {.variables = {}});
    EXPECT_EQ(world.local_rank(), rank);
    EXPECT_EQ(world.group().sum(1), 3);
  });
}

TEST(Foreign, FromAnInvitation) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  MeetingPlace host("127.0.0.1", Log::silent());
  const std::string invitation = host.invitation();
  as_ranks(2, [&](int rank) {
    Environment place;
    place.rank = rank;
    place.size = 2;
    place.local_size = 2;
    const World world = world_from_invitation(invitation, place, {.variables = {}}, rank == 0 ? &host : nullptr);
    EXPECT_EQ(world.group().sum(1), 2);
  });
}

}  // namespace
}  // namespace bonfire::foreign_test
