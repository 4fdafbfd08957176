#include "bonfire/base/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <thread>
#include <vector>

#include "bonfire/base/input_file.h"
#include "bonfire/base/random.h"
#include "tests/support/file_limit.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace {

// What the system answers to the library, which finds these two functions before the system's.
struct Disk {
  int syncs = 0;
  int failing_sync = 0;  // the how manieth fails; 0: none
  int reason = 0;        // of what fails, errno
  bool fails_rename = false;
} disk;

int refuse(int reason) {
  errno = reason;
  return -1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int fsync(int file) {
  if (++disk.syncs == disk.failing_sync) return refuse(disk.reason);
  return static_cast<int>(syscall(SYS_fsync, file));
}

extern "C" __attribute__((visibility("default"))) int rename(const char* from, const char* to) noexcept {
  if (disk.fails_rename) return refuse(disk.reason);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace bonfire::output_file_test {
namespace {
namespace fs = std::filesystem;
using bonfire::testing::FileLimit;
using bonfire::testing::Folder;
using bonfire::testing::thrown;

class OutputFiles : public ::testing::Test {
 protected:
  OutputFiles() { disk = {}; }
  ~OutputFiles() override { disk = {}; }

  std::set<std::string> names() const {
    std::set<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_.path())) all.insert(entry.path().filename());
    return all;
  }
  std::string error_of(const std::string& name, const std::string& content = "new") const {
    return thrown<WriteError>([&] { write_file(folder_ / name, content); });
  }

  Folder folder_;
};

TEST_F(OutputFiles, HaveTheirNameOnceTheyAreWhole) {
  folder_.write("a", "old");
  {
    OutputFile file(folder_ / "a");
    file.append("ne");
    file.append("w");
    EXPECT_EQ(folder_.read("a"), "old");
    EXPECT_EQ(names().size(), 2u);
    EXPECT_EQ(disk.syncs, 0);
    file.commit();
    EXPECT_EQ(disk.syncs, 2) << "the file and its folder";
  }
  EXPECT_EQ(folder_.read("a"), "new");
  write_file(folder_ / "a", "newer", Survives::process);
  EXPECT_EQ(disk.syncs, 2);
  EXPECT_EQ(folder_.read("a"), "newer");
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(OutputFiles, WithoutCommitNothingIsLeft) {
  folder_.write("a", "old");
  {
    OutputFile file(folder_ / "a");
    file.append(std::string(1 << 20, 'x'));
  }
  EXPECT_EQ(folder_.read("a"), "old");
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(OutputFiles, PiecesOfAnySizeComeInOrder) {
  const Random random(7);
  std::string expected;
  OutputFile file(folder_ / "a");
  for (std::uint64_t piece = 0; piece < 200; ++piece) {
    const std::size_t bytes = random.below(2 * piece, piece % 10 == 0 ? 300'000 : 3'000);
    const std::string text(bytes, static_cast<char>('a' + piece % 26));
    file.append(text);
    expected += text;
    EXPECT_EQ(file.size(), expected.size());
    if (piece % 7 != 0 || expected.empty()) continue;
    const auto offset = random.below(2 * piece + 1, expected.size());
    const auto most = std::min<std::uint64_t>(expected.size() - offset, 5);
    file.overwrite(offset, std::as_bytes(std::span("-----", most)));
    expected.replace(offset, most, most, '-');
  }
  EXPECT_THROW(file.overwrite(file.size(), std::as_bytes(std::span("x", 1))), Error);
  file.commit();
  EXPECT_TRUE(folder_.read("a") == expected);
  EXPECT_THROW(file.append("more"), Error);
  EXPECT_THROW(file.commit(), Error);
  EXPECT_TRUE(folder_.read("a") == expected);
}

TEST_F(OutputFiles, WriteRunsOfThreadsBesideOneAnother) {
  std::vector<std::thread> threads;
  for (int writer = 0; writer < 4; ++writer)
    threads.emplace_back([&, writer] {
      for (int time = 0; time < 50; ++time)
        write_file(folder_ / "a", std::string(1000, static_cast<char>('a' + writer)), Survives::process);
    });
  for (auto& thread : threads) thread.join();
  const std::string text = folder_.read("a");
  EXPECT_EQ(text, std::string(1000, text[0]));
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(OutputFiles, AFullDiskIsNamedAndNothingIsLeft) {
  folder_.write("a", "old");
  {
    const FileLimit limit(100'000);
    EXPECT_EQ(error_of("a", std::string(100'001, 'x')), "'" + folder_ / "a" + "': cannot be written: File too large");
    OutputFile file(folder_ / "b");  // found out when what was collected is handed over
    for (int piece = 0; piece < 9; ++piece) file.append(std::string(11'000, 'x'));
    file.append(std::string(2'000, 'x'));
    EXPECT_NE(thrown<WriteError>([&] { file.commit(); }), "");
    EXPECT_THROW(file.append("x"), Error);
  }
  EXPECT_EQ(folder_.read("a"), "old");
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(OutputFiles, EveryStepOfTheDiskThatFailsIsNamed) {
  folder_.write("a", "old");
  const std::string start = "'" + folder_ / "a" + "': cannot be written: ";
  disk = {.failing_sync = 1, .reason = EIO};
  EXPECT_EQ(error_of("a"), start + "flushing it to the disk: Input/output error");
  EXPECT_EQ(folder_.read("a"), "old");
  disk = {.reason = EDQUOT, .fails_rename = true};
  const auto renaming = error_of("a");
  EXPECT_EQ(renaming.find(start + "renaming '" + folder_ / "a."), 0u) << renaming;
  EXPECT_NE(renaming.find("Disk quota exceeded"), std::string::npos) << renaming;
  EXPECT_EQ(folder_.read("a"), "old");
  disk = {.failing_sync = 2, .reason = EIO};
  EXPECT_EQ(error_of("a"), start + "it has its name, but its folder cannot be flushed to the disk: Input/output error");
  EXPECT_EQ(folder_.read("a"), "new");
  disk = {.failing_sync = 2, .reason = EINVAL};  // a file system that has no such operation for folders
  EXPECT_EQ(error_of("a", "newer"), "");
  EXPECT_EQ(folder_.read("a"), "newer");
  EXPECT_EQ(names(), (std::set<std::string>{"a"}));
}

TEST_F(OutputFiles, NamesThatCannotBeAreRefusedBeforeAnythingIsWritten) {
  EXPECT_EQ(thrown<WriteError>([] { OutputFile file("/nowhere/a"); }),
            "'/nowhere/a': cannot be written: No such file or directory");
  fs::create_directory(folder_ / "folder");
  EXPECT_EQ(thrown<WriteError>([&] { OutputFile file(folder_ / "folder"); }),
            "'" + folder_ / "folder" + "': cannot be written: Is a directory");
  // A rename would leave a file where the device was.
  EXPECT_EQ(thrown<WriteError>([] { OutputFile file("/dev/full"); }),
            "'/dev/full': cannot be written: it is not a plain file: File exists");
  folder_.write("file", "");
  EXPECT_EQ(thrown<WriteError>([&] { OutputFile file(folder_ / "file/a"); }),
            "'" + folder_ / "file/a" + "': cannot be written: Not a directory");
  EXPECT_EQ(names(), (std::set<std::string>{"file", "folder"}));
}

// Root may write anywhere: the test becomes somebody else for a while.
TEST_F(OutputFiles, AFolderThatIsReadOnlyIsNamed) {
  const bool root = geteuid() == 0;
  ASSERT_EQ(chmod(folder_.path().c_str(), 0555), 0);
  ASSERT_EQ(seteuid(root ? 65534 : geteuid()), 0);
  const std::string error = error_of("a");
  ASSERT_EQ(seteuid(root ? 0 : geteuid()), 0);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  EXPECT_EQ(error, "'" + folder_ / "a" + "': cannot be written: Permission denied");
}

TEST_F(OutputFiles, WhatAKilledProcessLeftIsInNobodysWay) {
  for (int number = 0; number < 2000; ++number) folder_.write(fmt::format("a.{}.{}.part", getpid(), number), "left");
  write_file(folder_ / "a", "new", Survives::process);
  EXPECT_EQ(folder_.read("a"), "new");
  EXPECT_EQ(names().size(), 2001u);
}

TEST(InputFiles, AreReadWholeOrInPieces) {
  const Folder folder;
  folder.write("a", "0123456789");
  const InputFile file(folder / "a");
  EXPECT_EQ(file.size(), 10u);
  EXPECT_EQ(file.text(10), "0123456789");
  EXPECT_EQ(thrown<ConfigError>([&] { file.text(9); }), "'" + folder / "a" + "': has 10 bytes, must have at most 9");
  char piece[3];
  file.read(4, std::as_writable_bytes(std::span(piece)));
  EXPECT_EQ(std::string(piece, 3), "456");
  fs::resize_file(folder / "a", 5);
  EXPECT_EQ(thrown<Error>([&] { file.read(4, std::as_writable_bytes(std::span(piece))); }),
            "'" + folder / "a" + "': ends at byte 5, but had 10 bytes when it was opened: it has been changed since");
  folder.write("empty", "");
  EXPECT_EQ(InputFile(folder / "empty").text(0), "");
  EXPECT_EQ(thrown<ConfigError>([&] { InputFile missing(folder / "b"); }),
            "'" + folder / "b" + "': No such file or directory");
  EXPECT_EQ(thrown<ConfigError>([&] { InputFile other(folder.path()); }), "'" + folder.path().string() + "': is not a file");
}

}  // namespace
}  // namespace bonfire::output_file_test
