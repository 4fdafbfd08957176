#include "bonfire/train/run_folder.h"

#include <gtest/gtest.h>

#include <fstream>

#include "bonfire/base/error.h"
#include "tests/support/shell.h"

namespace bonfire::run_folder_test {
namespace {
namespace fs = std::filesystem;

class RunFolder : public ::testing::Test {
 protected:
  RunFolder() { config_ = parse_config("[run]\nname = \"demo\"\n", "a.toml", {"run.folder=" + parent_.string()}); }

  const bonfire::testing::Folder folder_;
  const fs::path parent_ = folder_.path() / "runs";
  Config config_;
};

TEST_F(RunFolder, GetsANumberWhereItExistsAndLatestFollows) {
  EXPECT_EQ(make_run_folder(config_), parent_ / "demo");
  EXPECT_EQ(fs::read_symlink(parent_ / "demo-latest"), "demo");
  EXPECT_EQ(make_run_folder(config_), parent_ / "demo-2");
  EXPECT_EQ(make_run_folder(config_), parent_ / "demo-3");
  EXPECT_EQ(fs::read_symlink(parent_ / "demo-latest"), "demo-3");
}

TEST_F(RunFolder, ThatIsDiscardedLeavesTheLinkAsItWas) {
  const fs::path first = make_run_folder(config_), second = make_run_folder(config_), third = make_run_folder(config_);
  discard_run_folder(config_, second);
  EXPECT_FALSE(fs::exists(second));
  EXPECT_EQ(fs::read_symlink(parent_ / "demo-latest"), "demo-3");
  discard_run_folder(config_, third);
  EXPECT_FALSE(fs::exists(third));
  EXPECT_EQ(fs::read_symlink(parent_ / "demo-latest"), "demo");
  discard_run_folder(config_, first);
  EXPECT_TRUE(fs::is_empty(parent_));
}

TEST_F(RunFolder, IsFoundByTheLaunchThatHasSignedIt) {
  EXPECT_EQ(run_folder_of(config_, "one"), std::nullopt);
  const fs::path first = make_run_folder(config_), second = make_run_folder(config_), third = make_run_folder(config_);
  EXPECT_EQ(run_folder_of(config_, "one"), std::nullopt);
  sign_run_folder(first, "one");
  sign_run_folder(second, "one");
  sign_run_folder(third, "two");
  EXPECT_EQ(run_folder_of(config_, "one"), second);
  EXPECT_EQ(run_folder_of(config_, "two"), third);
  EXPECT_EQ(run_folder_of(config_, "on"), std::nullopt);
  // A run of another name.
  fs::create_directory(parent_ / "demo-x");
  sign_run_folder(parent_ / "demo-x", "three");
  EXPECT_EQ(run_folder_of(config_, "three"), std::nullopt);
}

TEST_F(RunFolder, SomebodyElsesFileIsLeftAlone) {
  fs::create_directories(parent_ / "demo-latest");
  EXPECT_EQ(make_run_folder(config_), parent_ / "demo");
  EXPECT_TRUE(fs::is_directory(fs::symlink_status(parent_ / "demo-latest")));
}

TEST_F(RunFolder, ThatCannotBeMadeIsTheUsersError) {
  fs::create_directories(parent_);
  std::ofstream(parent_ / "file") << "x";
  config_.run.folder = (parent_ / "file" / "runs").string();
  EXPECT_THROW(make_run_folder(config_), ConfigError);
}

}  // namespace
}  // namespace bonfire::run_folder_test
