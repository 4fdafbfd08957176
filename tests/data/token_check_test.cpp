#include "bonfire/data/token_check.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <vector>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/data/token_files.h"
#include "bonfire/data/token_writer.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

// Files as training meets them: large, changed while they are read, or no files at all.
namespace bonfire::token_check_test {
namespace {
namespace fs = std::filesystem;
using bonfire::testing::Folder;
using bonfire::testing::thrown;

constexpr std::int64_t vocab = 1000;

std::string write_tokens(const std::string& path, std::size_t count) {
  std::vector<std::int64_t> tokens(count);
  for (std::size_t at = 0; at < count; ++at) tokens[at] = static_cast<std::int64_t>(at % vocab);
  TokenWriter writer({.path = path, .vocab = vocab});
  writer.append(tokens);
  writer.finish();
  return path;
}

// Changes one token and nothing else that a look at the folder would show.
void spoil(const std::string& path, std::size_t token, std::uint16_t value) {
  const auto time = fs::last_write_time(path);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(1024 + 2 * token));
    file.write(reinterpret_cast<const char*>(&value), 2);
  }
  fs::last_write_time(path, time);
}

std::string check(const std::string& path, TokenCheckOptions options) {
  if (options.vocab == 0) options.vocab = vocab;
  return thrown<Error>([&] { check_tokens(TokenFile(path), options); });
}

TEST(TokenCheck, AFullCheckIsDoneOnceAndItsResultKept) {
  const Folder folder;
  const auto path = write_tokens(folder / "a.bin", 5000);
  EXPECT_EQ(check(path, {.how = TokenCheck::full}), "");
  const auto record = nlohmann::json::parse(folder.read("a.bin.checked"));
  EXPECT_EQ(record.at("bytes"), 1024 + 2 * 5000);
  EXPECT_EQ(record.at("largest_token"), 999);

  spoil(path, 1234, 5000);
  EXPECT_EQ(check(path, {.how = TokenCheck::full}), "") << "it was read again";
  // The same answer does not hold for a smaller vocabulary,
  EXPECT_NE(check(path, {.how = TokenCheck::full, .vocab = 900}).find("token 900 at byte 2824 is 900"), std::string::npos);
  // nor for a file that has changed since.
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::milliseconds(1));
  EXPECT_NE(check(path, {.how = TokenCheck::full}).find("token 1234 at byte 3492 is 5000, must be 0 to 999"),
            std::string::npos);
}

TEST(TokenCheck, WhatCannotBeKeptIsSaidAndWhatIsKeptMayBeDamaged) {
  const Folder folder;
  const auto path = write_tokens(folder / "a.bin", 5000);
  for (const char* damaged :
       {"", "{", "[1]", "{\"bytes\": 11024}", "{\"bytes\": \"x\", \"modified_ns\": 1, \"largest_token\": 1}"}) {
    folder.write("a.bin.checked", damaged);
    EXPECT_EQ(check(path, {.how = TokenCheck::full}), "") << damaged;
    EXPECT_EQ(nlohmann::json::parse(folder.read("a.bin.checked")).at("largest_token"), 999) << damaged;
  }
  fs::remove(path + ".checked");
  fs::create_directories(path + ".checked/full");
  std::string said;
  const Log log([&](LogLevel, std::string_view words) { said += words; });
  EXPECT_EQ(check(path, {.how = TokenCheck::full, .log = log}), "");
  EXPECT_NE(said.find("a.bin.checked': cannot be written"), std::string::npos) << said;
  EXPECT_NE(said.find("will be checked again next time"), std::string::npos) << said;
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 2) << "something was left";
}

TEST(TokenCheck, ASampleReadsOnlyAsMuchAsItMay) {
  const Folder folder;
  constexpr std::size_t piece = 1 << 19;  // tokens in a MiB
  const auto path = write_tokens(folder / "a.bin", 8 * piece);
  const TokenCheckOptions sample{.how = TokenCheck::sample, .sample_bytes = 3 << 20};
  EXPECT_EQ(check(path, sample), "");
  spoil(path, piece + 5, 5000);  // in the second piece, and the sample is the first, the fourth and the last
  EXPECT_EQ(check(path, sample), "");
  EXPECT_NE(check(path, {.how = TokenCheck::sample, .sample_bytes = 1 << 30}), "") << "a small file is read whole";
  spoil(path, 8 * piece - 1, 5000);
  EXPECT_NE(check(path, sample).find("token 4194303"), std::string::npos);
  EXPECT_EQ(check(path, {.how = TokenCheck::off}), "");
  EXPECT_FALSE(fs::exists(path + ".checked")) << "a sample is no proof";

  // What the sample has not seen is named when it is read.
  const TokenFiles files({.paths = {path}, .vocab = vocab, .sequence = 16, .check = TokenCheck::off});
  std::vector<std::int64_t> window(17);
  EXPECT_NO_THROW(files.window(0, window));
  EXPECT_NE(thrown<Error>([&] { files.window(piece / 16, window); }).find("token 524293 at byte 1049610 is 5000"),
            std::string::npos)
      << thrown<Error>([&] { files.window(piece / 16, window); });
}

TEST(TokenCheck, ShowsHowFarItIs) {
  const Folder folder;
  const auto path = write_tokens(folder / "a.bin", 2 << 20);
  std::vector<std::string> said;
  const Log log([&](LogLevel, std::string_view words) { said.emplace_back(words); });
  EXPECT_EQ(check(path, {.how = TokenCheck::full, .progress_every = std::chrono::milliseconds(0), .log = log}), "");
  ASSERT_EQ(said.size(), 3);
  EXPECT_NE(said[1].find("a.bin': 2.00 MiB of 4.00 MiB, 50%"), std::string::npos) << said[1];
}

TEST(TokenCheck, AFileThatShrinksWhileItIsReadIsNamed) {
  const Folder folder;
  const auto path = write_tokens(folder / "a.bin", 1 << 16);
  const TokenFiles files({.paths = {path}, .vocab = vocab, .sequence = 16});
  fs::resize_file(path, 1024 + 2 * 4000);
  std::vector<std::int64_t> window(17);
  EXPECT_NO_THROW(files.window(100, window));
  EXPECT_EQ(thrown<Error>([&] { files.window(3000, window); }),
            "'" + path + "': ends at byte 97024, but had 132096 bytes when it was opened: it has been changed since");
}

TEST(TokenCheck, ANamedPipeIsNoFile) {
  const Folder folder;
  ASSERT_EQ(mkfifo((folder / "pipe.bin").c_str(), 0600), 0);
  EXPECT_EQ(thrown<Error>([&] { TokenFile file(folder / "pipe.bin"); }), "'" + folder / "pipe.bin" + "': is not a file");
}

TEST(TokenCheck, ThereMayBeMoreFilesThanAProcessMayOpenByDefault) {
  const Folder folder;
  TokenFilesOptions options{.paths = {}, .vocab = vocab, .sequence = 16};
  for (int number = 0; number < 60; ++number)
    options.paths.push_back(write_tokens(folder / ("f" + std::to_string(number) + ".bin"), 100));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 40;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(thrown<Error>([&] { EXPECT_EQ(TokenFiles(options).size(), 60 * 6); }), "");
  setrlimit(RLIMIT_NOFILE, &before);
}

}  // namespace
}  // namespace bonfire::token_check_test
