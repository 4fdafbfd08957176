#include "bonfire/base/open_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "bonfire/base/error.h"
#include "tests/support/thrown.h"

namespace bonfire::open_files_test {
namespace {
using bonfire::testing::thrown;

class OpenFiles : public ::testing::Test {
 protected:
  OpenFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = 40;
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~OpenFiles() override { setrlimit(RLIMIT_NOFILE, &before_); }

  rlim_t allowed() const {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
  }

  rlimit before_{};
};

TEST_F(OpenFiles, RiseToTheHardLimitOnce) {
  EXPECT_TRUE(raise_open_files());
  EXPECT_EQ(allowed(), before_.rlim_max);
  EXPECT_FALSE(raise_open_files());
}

TEST_F(OpenFiles, MoreThanTheHardLimitIsRefusedWithBothNumbers) {
  if (before_.rlim_max == RLIM_INFINITY) GTEST_SKIP() << "this process may open any number of files";
  require_open_files(41, "two ranks");
  EXPECT_EQ(allowed(), before_.rlim_max);
  const auto most = static_cast<long>(before_.rlim_max);
  EXPECT_EQ(
      thrown<ConfigError>([&] { require_open_files(most + 1, "two ranks"); }),
      fmt::format("two ranks need about {} open files, and this process may have {} (ulimit -Hn): raise the hard limit",
                  most + 1, most));
}

}  // namespace
}  // namespace bonfire::open_files_test
