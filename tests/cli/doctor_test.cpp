#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace bonfire::doctor_test {
namespace {

TEST(Doctor, SaysWhatThereIs) {
  const bonfire::testing::Scratch scratch;
  const auto words = scratch.bonfire("doctor");
  EXPECT_EQ(words.code, 0) << words.err;
  for (const char* part : {"cores", "memory", "LibTorch 2.11", "GPU", "loopback", "open files", "/dev/shm", "launch"}) {
    EXPECT_NE(words.out.find(part), std::string::npos) << part << " is not in:\n" << words.out;
  }
  const auto torchrun =
      scratch.bonfire("doctor", "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1");
  EXPECT_NE(torchrun.out.find("torchrun: rank 1 of 4"), std::string::npos) << torchrun.out;
  const auto json = scratch.bonfire("doctor --json");
  ASSERT_FALSE(json.out.empty()) << json.err;
  EXPECT_EQ(json.out.front(), '{');
}

TEST(Doctor, PrintsTheReferencePage) {
  const bonfire::testing::Scratch scratch;
  std::ifstream in(BONFIRE_SOURCE_DIR "/docs/configuration.md");
  std::stringstream page;
  page << in.rdbuf();
  EXPECT_TRUE(scratch.bonfire("doctor --config-reference").out == page.str());
}

}  // namespace
}  // namespace bonfire::doctor_test
