// What a machine or a container allows.
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/comm/cores.h"
#include "tests/comm/child.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using test::Child;
using test::Folder;

const std::string kBonfire = BONFIRE_BUILD_DIR "/bonfire";

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void write(const std::string& file, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(file).parent_path());
  std::ofstream(file) << text;
}

TEST(Limits, OpenFilesAreRaisedToWhatIsAllowed) {
  Child run({"sh", "-c", "ulimit -Sn 40; ulimit -Hn 500; exec " + kBonfire + " launch -n 16 -- sh -c 'ulimit -n'"});
  EXPECT_EQ(run.wait(20s), 0) << run.output();
  EXPECT_TRUE(contains(run.output(), "[rank 15] 500\n")) << run.output();
}

TEST(Limits, TooFewOpenFilesAreRefusedWithBothNumbers) {
  Child run({"sh", "-c", "ulimit -Sn 100; ulimit -Hn 100; exec " + kBonfire + " launch -n 64 -- true"});
  EXPECT_EQ(run.wait(20s), 2) << run.output();
  EXPECT_TRUE(
      contains(run.output(), "bonfire: 64 ranks need about 576 open files, and this process may have 100 (ulimit -Hn)"))
      << run.output();
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

}  // namespace
}  // namespace bonfire
