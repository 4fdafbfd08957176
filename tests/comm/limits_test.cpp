// What a machine or a container allows.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/cores.h"
#include "bonfire/comm/device.h"
#include "tests/comm/launched.h"
#include "tests/support/port.h"

namespace bonfire::limits_test {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::contains;
using test::Folder;
using test::kBonfire;

void write(const std::string& file, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(file).parent_path());
  std::ofstream(file) << text;
}

TEST(Limits, OpenFilesAreRaisedToWhatIsAllowed) {
  Child run({"sh", "-c", "ulimit -Sn 40; ulimit -Hn 500; exec " + kBonfire + " launch -n 16 -- sh -c 'ulimit -n'"});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(contains(run.output(), "[rank 15] 500\n")) << run.output();
}

TEST(Limits, TooFewOpenFilesAreRefusedWithBothNumbers) {
  Child run({"sh", "-c", "ulimit -Sn 100; ulimit -Hn 100; exec " + kBonfire + " launch -n 64 -- true"});
  EXPECT_EQ(run.wait(60s), 2) << run.output();
  EXPECT_TRUE(
      contains(run.output(), "bonfire: 64 ranks need about 448 open files, and this process may have 100 (ulimit -Hn)"))
      << run.output();
}

// Where no launcher of ours has: rank 0 holds the connections of all.
TEST(Limits, TooFewOpenFilesForTheRankThatHostsTheStoreAreRefused) {
  const testing::Port port;
  Child run({"sh", "-c", "ulimit -n 100; exec " + test::kProgram}, {{"RANK", "0"},
                                                                    {"WORLD_SIZE", "200"},
                                                                    {"LOCAL_RANK", "0"},
                                                                    {"LOCAL_WORLD_SIZE", "200"},
                                                                    {"MASTER_ADDR", "127.0.0.1"},
                                                                    {"MASTER_PORT", port.number()}});
  EXPECT_EQ(run.wait(60s), 2) << run.output();
  EXPECT_TRUE(
      contains(run.output(), "200 ranks, which meet at rank 0, need about 464 open files, and this process may have 100"))
      << run.output();
}

TEST(Limits, TooFewOpenFilesForTheConnectionsOfARankAreRefused) {
  Child run(test::launch({"-n", "8"}, "ulimit -n 20; exec " + test::kProgram));
  EXPECT_EQ(run.wait(60s), 2) << run.output();
  EXPECT_TRUE(contains(run.output(), "the connections of one rank to 7 others (Gloo) need about ")) << run.output();
}

TEST(Limits, AWorkingFolderThatIsGoneIsNamed) {
  const Folder folder;
  Child run({"sh", "-c",
             fmt::format("mkdir {0}/gone; cd {0}/gone; rmdir {0}/gone; exec {1} launch -- true", folder.path(), kBonfire)});
  EXPECT_EQ(run.wait(60s), 2);
  EXPECT_EQ(run.output(), "bonfire: the working folder does not exist any more: change to another one\n");
}

TEST(Limits, AQuotaOfVersion2IsTheSmallestOnTheWayUp) {
  const Folder folder;
  const std::string own = folder.path() + "/own", root = folder.path() + "/cgroup";
  write(own, "0::/a/b\n");
  write(root + "/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(own, root), 0);
  write(root + "/a/cpu.max", "250000 100000\n");
  EXPECT_EQ(cpu_quota(own, root), 2.5);
  write(root + "/a/b/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpu_quota(own, root), 0.5);
}

// A container sees its own group as the top, while its path may name the host's.
TEST(Limits, AQuotaIsFoundWhereTheContainerSeesOnlyItself) {
  const Folder folder;
  const std::string own = folder.path() + "/own", root = folder.path() + "/cgroup";
  write(own, "0::/docker/0123\n");
  write(root + "/cpu.max", "300000 100000\n");
  EXPECT_EQ(cpu_quota(own, root), 3);
}

TEST(Limits, AQuotaOfVersion1) {
  const Folder folder;
  const std::string own = folder.path() + "/own", root = folder.path() + "/cgroup";
  write(own, "5:memory:/x\n4:cpu,cpuacct:/docker/0123\n");
  EXPECT_EQ(cpu_quota(own, root), 0);
  write(root + "/cpu,cpuacct/docker/0123/cpu.cfs_period_us", "100000\n");
  write(root + "/cpu,cpuacct/docker/0123/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cpu_quota(own, root), 0);
  write(root + "/cpu,cpuacct/docker/0123/cpu.cfs_quota_us", "150000\n");
  EXPECT_EQ(cpu_quota(own, root), 1.5);
  std::filesystem::rename(root + "/cpu,cpuacct", root + "/cpu");
  EXPECT_EQ(cpu_quota(own, root), 1.5);
}

TEST(Limits, NoQuotaIsNoLimit) {
  EXPECT_EQ(cpu_quota("/no/such/file", "/no/such/folder"), 0);
  EXPECT_GE(usable_cores(), 1);
}

TEST(Limits, RanksComeFromTheEnvironmentWhereNobodySaysMore) {
  Child asked({kBonfire, "launch", "--", "sh", "-c", "echo of $WORLD_SIZE"}, {{"BONFIRE_RANKS", "3"}});
  EXPECT_EQ(asked.wait(60s), 0) << asked.output();
  EXPECT_TRUE(contains(asked.output(), "[rank 2] of 3")) << asked.output();
  Child told({kBonfire, "launch", "-n", "2", "--", "sh", "-c", "echo of $WORLD_SIZE"}, {{"BONFIRE_RANKS", "3"}});
  EXPECT_EQ(told.wait(60s), 0) << told.output();
  EXPECT_TRUE(contains(told.output(), "[rank 1] of 2")) << told.output();
  Child nonsense({kBonfire, "launch", "--", "true"}, {{"BONFIRE_RANKS", "many"}});
  EXPECT_EQ(nonsense.wait(60s), 2) << nonsense.output();
  EXPECT_TRUE(contains(nonsense.output(), "BONFIRE_RANKS is 'many'")) << nonsense.output();
}

TEST(Limits, OneRankForEachGpuWhereNobodySaysMore) {
  const int gpus = std::max(1, gpu_count());
  Child run({kBonfire, "launch", "--", "sh", "-c", "echo of $WORLD_SIZE"}, {{"BONFIRE_RANKS", ""}});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(contains(run.output(), fmt::format("[rank {}] of {}", gpus - 1, gpus))) << run.output();
}

TEST(Limits, TrainingTakesItsRanksFromTheEnvironment) {
  const Folder folder;
  write(folder.path() + "/a.toml",
        "[run]\nname = \"tiny\"\ndevice = \"cpu\"\n[model]\ndim = 16\nlayers = 1\nheads = 2\nvocab = 32\n[data]\nsequence = "
        "8\n[train]\nsteps = 2\nbatch = 4\n");
  Child run({kBonfire, "train", folder.path() + "/a.toml", "--set", "run.folder=" + folder.path() + "/runs"},
            {{"BONFIRE_RANKS", "2"}});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/runs/tiny/logs/rank-1.log")) << run.output();
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/runs/tiny/logs/rank-2.log")) << run.output();
}

}  // namespace
}  // namespace bonfire::limits_test
