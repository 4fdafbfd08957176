#include "bonfire/train/run_file.h"

#include <gtest/gtest.h>

#include "tests/support/file_limit.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

// What happens when the system will not write.
namespace bonfire::run_file_test {
namespace {
using bonfire::testing::FileLimit;
using bonfire::testing::Folder;
using bonfire::testing::Loop;
using bonfire::testing::thrown;

int times_in(const std::string& text, const std::string& words) {
  int times = 0;
  for (auto at = text.find(words); at != std::string::npos; at = text.find(words, at + words.size())) ++times;
  return times;
}

TEST(RunFile, SaysWhyItCannotBeWritten) {
  RunFile full("/dev/full", RunFile::Start::empty);
  EXPECT_EQ(thrown<WriteError>([&] { full.append("x"); }), "'/dev/full': cannot be written: No space left on device");
}

TEST(RunFile, ARecordThatDoesNotFitLeavesNothingOfItself) {
  const Folder folder;
  RunFile file(folder / "a", RunFile::Start::empty);
  file.append(std::string(60, 'a'));
  {
    const FileLimit limit(100);
    EXPECT_NE(thrown<WriteError>([&] { file.append(std::string(60, 'b')); }).find("File too large"), std::string::npos);
  }
  file.append("c");
  EXPECT_EQ(folder.read("a"), std::string(60, 'a') + "c");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()), 1);
}

TEST(DiskPolicy, WarnsOnceUntilTheFileCanBeWrittenAgain) {
  std::vector<std::string> said;
  DiskPolicy policy({}, Log([&](LogLevel, std::string_view words) { said.emplace_back(words); }));
  const auto refused = [] { throw WriteError("a", ENOSPC); };
  for (int time = 0; time < 3; ++time) policy.attempt("a", refused);
  policy.attempt("b", refused);
  policy.attempt("a", [] {});
  policy.attempt("a", [] {});
  policy.attempt("a", refused);
  ASSERT_EQ(said.size(), 4);
  EXPECT_EQ(said[0], "'a': cannot be written: No space left on device; training goes on without it (run.disk_full = warn)");
  EXPECT_EQ(said[2], "'a' is written again; 3 records in between could not be");
  EXPECT_EQ(said[3], said[0]);
}

TEST(DiskPolicy, StopsOnlyWhatIsNotFinished) {
  Config config;
  config.run.disk_full = "stop";
  DiskPolicy policy(config, Log::silent());
  const auto refused = [] { throw WriteError("a", ENOSPC); };
  EXPECT_THROW(policy.attempt("a", refused), Error);
  policy.finish();
  EXPECT_NO_THROW(policy.attempt("a", refused));
}

TEST_F(Loop, ADiskThatIsFullIsAWarningAndTheRunGoesOn) {
  ::testing::internal::CaptureStderr();
  const auto outcome = [&] {
    const FileLimit limit(4096);
    return run("llama", 2, {"train.steps=40", "train.trace_steps=20"});
  }();
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(outcome.report.steps, 40);
  EXPECT_GT(outcome.metrics.size(), 10u);
  EXPECT_LT(outcome.metrics.size(), 40u);  // and each of them is whole: the fixture has read them as JSON
  for (const char* file : {"metrics.jsonl", "trace.json"})
    EXPECT_EQ(times_in(said, std::string(file) + "': cannot be written: File too large; training goes on"), 1) << said;
  EXPECT_EQ(times_in(said, "events.out.tfevents"), 1) << said;
  EXPECT_EQ(times_in(said, "training goes on without it"), 3) << said;
}

TEST_F(Loop, ADiskThatIsFullEndsTheRunWhereThatIsAskedFor) {
  const FileLimit limit(4096);
  const auto outcome = run("llama", 1, {"train.steps=40", "run.disk_full=stop"});
  EXPECT_NE(outcome.error.find("cannot be written: File too large; the run ends (run.disk_full = stop"), std::string::npos)
      << outcome.error;
  EXPECT_LT(outcome.metrics.size(), 40u);
}

TEST_F(Loop, ARunThatHasDoneAllItsStepsDoesNotFailForAFile) {
  const FileLimit limit(4096);
  const auto outcome =
      run("llama", 2, {"run.disk_full=stop", "train.microbatch=4", "train.trace_from=1", "train.trace_steps=4"});
  EXPECT_EQ(outcome.error, "");
  EXPECT_EQ(outcome.report.steps, 4);
  EXPECT_FALSE(std::filesystem::exists(outcome.folder / "trace.json")) << "the trace was too small for this test";
}

}  // namespace
}  // namespace bonfire::run_file_test
