#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/data/token_files.h"
#include "bonfire/data/token_writer.h"
#include "tests/support/thrown.h"

namespace bonfire::token_test {
namespace {

namespace fs = std::filesystem;
using bonfire::testing::thrown;
using Tokens = std::vector<std::int64_t>;

// Bytes as the formats describe them, put together here and not by the library.
struct Bytes {
  std::string text;
  template <class T>
  Bytes& put(std::uint64_t value) {
    for (std::size_t at = 0; at < sizeof(T); ++at) text += static_cast<char>(value >> (8 * at));
    return *this;
  }
  template <class T>
  Bytes& put_all(const Tokens& values) {
    for (const auto value : values) put<T>(static_cast<std::uint64_t>(value));
    return *this;
  }
};

template <class T>
std::string llmc_bytes(std::int32_t magic, std::int32_t version, const Tokens& tokens) {
  Bytes bytes;
  bytes.put<std::int32_t>(magic).put<std::int32_t>(version).put<std::int32_t>(tokens.size());
  bytes.text.resize(1024);
  return bytes.put_all<T>(tokens).text;
}

struct Index {
  std::uint64_t version = 1;
  int code = 8;
  Tokens lengths;
  Tokens pointers;
  Tokens documents;

  std::string bytes() const {
    Bytes bytes{std::string("MMIDIDX\0\0", 9)};
    bytes.put<std::uint64_t>(version).put<std::uint8_t>(code).put<std::uint64_t>(lengths.size());
    bytes.put<std::uint64_t>(documents.size());
    return bytes.put_all<std::int32_t>(lengths).put_all<std::int64_t>(pointers).put_all<std::int64_t>(documents).text;
  }
};

class TokenFileTest : public ::testing::Test {
 protected:
  TokenFileTest() {
    auto pattern = (fs::temp_directory_path() / "bonfire-tokens-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~TokenFileTest() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) {
    const auto path = (folder_ / name).string();
    fs::remove(path);  // some file systems flush a file that is overwritten, thousands of times here
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::string read(const std::string& name) {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path folder_;
};

Tokens all_of(const TokenFile& file) {
  Tokens tokens(file.size());
  file.copy(0, tokens);
  return tokens;
}

void expect_refused(const std::string& path, const std::vector<std::string>& words) {
  const auto message = thrown<ConfigError>([&] { TokenFile file(path); });
  ASSERT_FALSE(message.empty()) << path << " was accepted";
  EXPECT_EQ(message.find('\n'), std::string::npos);
  for (const auto& word : words) EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}

TEST_F(TokenFileTest, ReadsBothLlmcForms) {
  const Tokens small{0, 1, 50256, 65535, 7}, large{0, 65536, 128255, 2147483648, 4294967295};
  EXPECT_EQ(all_of(TokenFile(write("a.bin", llmc_bytes<std::uint16_t>(20240520, 1, small)))), small);
  EXPECT_EQ(all_of(TokenFile(write("b.bin", llmc_bytes<std::uint32_t>(20240801, 7, large)))), large);
}

TEST_F(TokenFileTest, ReadsEveryMegatronType) {
  const auto check = [&]<class T>(int code, T, const Tokens& tokens) {
    const std::int64_t width = sizeof(T);
    write("m.bin", Bytes().put_all<T>(tokens).text);
    write("m.idx",
          Index{.code = code, .lengths = {2, 0, 3}, .pointers = {0, 2 * width, 2 * width}, .documents = {0, 1, 3}}.bytes());
    for (const char* name : {"m.idx", "m.bin", "m"}) EXPECT_EQ(all_of(TokenFile((folder_ / name).string())), tokens);
  };
  check(1, std::uint8_t{}, {0, 1, 2, 200, 255});
  check(2, std::int8_t{}, {0, 1, 2, 100, 127});
  check(3, std::int16_t{}, {0, 1, 2, 200, 32767});
  check(4, std::int32_t{}, {0, 1, 2, 200, 2147483647});
  check(5, std::int64_t{}, {0, 1, 2, 200, 1LL << 40});
  check(8, std::uint16_t{}, {0, 1, 2, 200, 65535});
}

TEST_F(TokenFileTest, AMegatronFileMayBeginWithLlmcsMagic) {
  write("m.bin", Bytes().put<std::int32_t>(20240520).put<std::int32_t>(1).text);
  write("m.idx", Index{.lengths = {4}, .pointers = {0}, .documents = {0, 1}}.bytes());
  EXPECT_EQ(TokenFile((folder_ / "m.bin").string()).size(), 4);
}

TEST_F(TokenFileTest, RefusesBadLlmcFiles) {
  const Tokens tokens{1, 2, 3};
  expect_refused((folder_ / "none.bin").string(), {"none.bin", "No such file"});
  expect_refused(folder_.string(), {"not a file"});
  expect_refused(write("empty.bin", ""), {"empty.bin", "is empty"});
  expect_refused(write("short.bin", "ab"), {"short.bin", "cut short"});
  expect_refused(write("magic.bin", llmc_bytes<std::uint16_t>(20240521, 1, tokens)),
                 {"magic.bin", "byte 0", "20240521", "20240520", "20240801"});
  expect_refused(write("version.bin", llmc_bytes<std::uint16_t>(20240520, 7, tokens)), {"byte 4", "is 7", "must be 1"});
  expect_refused(write("none.bin", llmc_bytes<std::uint16_t>(20240520, 1, {})), {"byte 8", "is 0"});
  const auto good = llmc_bytes<std::uint16_t>(20240520, 1, tokens);
  expect_refused(write("odd.bin", good + "x"), {"1031 bytes", "must have 1030"});
  expect_refused(write("long.bin", good + "xx"), {"1032 bytes", "must have 1030"});
  expect_refused(write("type.bin", llmc_bytes<std::uint16_t>(20240801, 7, tokens)), {"1030 bytes", "must have 1036"});
}

TEST_F(TokenFileTest, RefusesBadMegatronFiles) {
  const Index good{.lengths = {2, 3}, .pointers = {0, 4}, .documents = {0, 1, 2}};
  write("m.bin", std::string(10, '\0'));
  const auto refused = [&](auto change, const std::vector<std::string>& words) {
    auto index = good;
    change(index);
    expect_refused(write("m.idx", index.bytes()), words);
  };
  refused([](Index& i) { i.version = 2; }, {"m.idx", "byte 9", "is 2", "must be 1"});
  for (const int code : {0, 6, 7, 9, 255})
    refused([=](Index& i) { i.code = code; }, {"m.idx", "byte 17", "is " + std::to_string(code)});
  refused([](Index& i) { i.lengths = {2, -3}; }, {"sequence 1", "byte 38", "is -3"});
  refused([](Index& i) { i.pointers = {0, 6}; }, {"sequence 1", "byte 50", "is 6", "must be 4"});
  refused([](Index& i) { i.pointers = {0, -4}; }, {"sequence 1", "is -4"});
  refused([](Index& i) { i.pointers = {2, 4}; }, {"sequence 0", "is 2", "must be 0"});
  refused([](Index& i) { i.documents = {0, 1, 3}; }, {"document bound 2", "byte 74", "is 3", "must be 2"});
  refused([](Index& i) { i.documents = {1, 1, 2}; }, {"document bound 0", "is 1"});
  refused([](Index& i) { i.documents = {0, 2, 1}; }, {"document bound 2", "is 1"});
  refused([](Index& i) { i.documents = {0}; }, {"byte 26", "is 1"});
  refused([](Index& i) { i.lengths = {2, 4}; }, {"m.bin", "10 bytes", "must have the 12"});
  refused([](Index& i) { i.lengths = {2, 2}; }, {"m.bin", "10 bytes", "must have the 8"});
  refused([](Index& i) { i.lengths = {0, 0}, i.pointers = {0, 0}; }, {"holds no token"});
  refused([](Index& i) { i.lengths = {}, i.pointers = {}; }, {"byte 18", "is 0"});

  // Counts whose products overflow.
  for (const std::uint64_t count : {~0ULL, 1ULL << 63, 1ULL << 61, 1ULL << 33}) {
    Bytes index{std::string("MMIDIDX\0\0", 9)};
    index.put<std::uint64_t>(1).put<std::uint8_t>(8).put<std::uint64_t>(count).put<std::uint64_t>(count);
    expect_refused(write("m.idx", index.text + std::string(100, '\0')), {"m.idx", "byte 18"});
  }
  write("m.idx", good.bytes());
  EXPECT_EQ(TokenFile((folder_ / "m").string()).size(), 5);
  fs::remove(folder_ / "m.bin");
  expect_refused((folder_ / "m.idx").string(), {"m.bin", "No such file"});
}

// A valid file cut anywhere, or with anything behind it, is refused and reads nothing outside.
TEST_F(TokenFileTest, RefusesEveryTruncation) {
  const auto llmc = llmc_bytes<std::uint16_t>(20240520, 1, Tokens(20, 3));
  for (std::size_t size = 0; size < llmc.size(); ++size) expect_refused(write("cut.bin", llmc.substr(0, size)), {"cut.bin"});
  const auto index = Index{.lengths = {2, 3}, .pointers = {0, 4}, .documents = {0, 1, 2}}.bytes();
  write("m.bin", std::string(10, '\0'));
  for (std::size_t size = 0; size < index.size(); ++size) expect_refused(write("m.idx", index.substr(0, size)), {"m.idx"});
  expect_refused(write("m.idx", index + 'x'), {"m.idx"});
  write("m.idx", index);
  for (std::size_t size = 0; size < 10; ++size) expect_refused(write("m.bin", std::string(size, '\0')), {"m.bin"});
}

// Random bytes changed in an index: it is refused, or what it says can be read.
TEST_F(TokenFileTest, SurvivesDamagedIndices) {
  const auto good = Index{.lengths = {2, 3}, .pointers = {0, 4}, .documents = {0, 1, 2}}.bytes();
  write("m.bin", std::string(10, '\1'));
  const Random random(12);
  int refused = 0;
  for (std::uint64_t round = 0; round < 2000; ++round) {
    auto bytes = good;
    for (std::uint64_t change = 0; change <= random.below(9 * round, 3); ++change)
      bytes[random.below(9 * round + 2 * change + 1, bytes.size())] =
          static_cast<char>(random.bits(9 * round + 2 * change + 2));
    const auto path = write("m.idx", bytes);
    try {
      const TokenFile file(path);
      EXPECT_EQ(all_of(file).size() * bytes_of(file.type()), 10);
    } catch (const ConfigError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1500);
}

TEST_F(TokenFileTest, NamesTheFirstTokenBeyondTheVocabulary) {
  const Random random(5);
  for (const std::size_t bad : {0, 1, 255, 256, 997, 9999}) {
    Tokens tokens(10000);
    for (std::size_t at = 0; at < tokens.size(); ++at) tokens[at] = static_cast<std::int64_t>(random.below(at, 1000));
    const auto check = [&](const std::string& path, std::uint64_t offset, std::int64_t value) {
      const TokenFilesOptions options{.paths = {path}, .vocab = 1000, .sequence = 16};
      const auto message = thrown<ConfigError>([&] { TokenFiles files(options); });
      EXPECT_NE(message.find(fmt::format("token {} at byte {} is {}, must be 0 to 999", bad, offset, value)),
                std::string::npos)
          << message;
    };
    const TokenFile good(write("good.bin", llmc_bytes<std::uint16_t>(20240520, 1, tokens)));
    EXPECT_NO_THROW(check_tokens(good, {.how = TokenCheck::sample, .vocab = 1000}));
    tokens[bad] = 1000;
    tokens[9999] = 1000;
    check(write("a.bin", llmc_bytes<std::uint16_t>(20240520, 1, tokens)), 1024 + 2 * bad, 1000);
    check(write("b.bin", llmc_bytes<std::uint32_t>(20240801, 7, tokens)), 1024 + 4 * bad, 1000);

    const auto signed_file = [&]<class T>(int code, T) {
      write("m.bin", Bytes().put_all<T>(tokens).text);
      return write("m.idx", Index{.code = code, .lengths = {10000}, .pointers = {0}, .documents = {0, 1}}.bytes());
    };
    tokens[bad] = tokens[9999] = -2;
    signed_file(3, std::int16_t{});
    check((folder_ / "m.bin").string(), 2 * bad, -2);
    signed_file(4, std::int32_t{});
    check((folder_ / "m.bin").string(), 4 * bad, -2);
    signed_file(5, std::int64_t{});
    check((folder_ / "m.bin").string(), 8 * bad, -2);
  }
  // A negative byte is below a large vocabulary when its sign is forgotten.
  write("s.bin", std::string(4, '\xfe'));
  const TokenFile file(write("s.idx", Index{.code = 2, .lengths = {4}, .pointers = {0}, .documents = {0, 1}}.bytes()));
  const TokenCheckOptions large{.how = TokenCheck::sample, .vocab = 50000};
  EXPECT_NE(thrown<ConfigError>([&] { check_tokens(file, large); }).find("token 0 at byte 0 is -2"), std::string::npos);
}

TEST_F(TokenFileTest, WindowsCoverTheFilesInOrder) {
  Tokens first(23), second(11);
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), 100);
  const TokenFilesOptions options{.paths = {write("a.bin", llmc_bytes<std::uint16_t>(20240520, 1, first)),
                                            write("b.bin", llmc_bytes<std::uint32_t>(20240801, 7, second))},
                                  .vocab = 200,
                                  .sequence = 5};
  const TokenFiles files(options);
  ASSERT_EQ(files.size(), 4 + 2);
  Tokens input(5), target(5), targets;
  for (std::uint64_t index = 0; index < files.size(); ++index) {
    files.read(index, input.data(), target.data());
    const std::int64_t start =
        index < 4 ? 5 * static_cast<std::int64_t>(index) : 100 + 5 * static_cast<std::int64_t>(index - 4);
    for (std::int64_t at = 0; at < 5; ++at) {
      EXPECT_EQ(input[at], start + at);
      EXPECT_EQ(target[at], start + at + 1);
    }
  }
  EXPECT_THROW(files.read(6, input.data(), target.data()), Error);

  auto overlapping = options;
  overlapping.stride = 1;
  EXPECT_EQ(TokenFiles(overlapping).size(), 18 + 6);
  auto apart = options;
  apart.stride = 6;  // no token in two windows
  EXPECT_EQ(TokenFiles(apart).size(), 3 + 1);

  auto longer = options;
  longer.sequence = 11;
  const auto message = thrown<ConfigError>([&] { TokenFiles refused(longer); });
  EXPECT_NE(message.find("b.bin': has 11 tokens, must have at least 12"), std::string::npos) << message;
  longer.sequence = 10;
  EXPECT_EQ(TokenFiles(longer).size(), 2 + 1);
  EXPECT_THROW(TokenFiles({.paths = {}, .vocab = 4, .sequence = 4}), ConfigError);
}

TEST_F(TokenFileTest, WhatIsWrittenIsWhatTheFormatsSay) {
  const Tokens one{5, 6, 7}, two{9};
  const auto written = [&](const std::string& name, TokenFormat format, std::int64_t vocab) {
    TokenWriter writer({.path = (folder_ / name).string(), .format = format, .vocab = vocab});
    writer.append({one.data(), 1});
    writer.append({one.data() + 1, 2});
    writer.end_document();
    writer.append(two);
    writer.finish();
    EXPECT_EQ(writer.tokens(), 4);
  };
  const Tokens all{5, 6, 7, 9};
  written("small.bin", TokenFormat::llmc, 65536);
  EXPECT_EQ(read("small.bin"), llmc_bytes<std::uint16_t>(20240520, 1, all));
  written("large.bin", TokenFormat::llmc, 65537);
  EXPECT_EQ(read("large.bin"), llmc_bytes<std::uint32_t>(20240801, 7, all));
  written("m2.bin", TokenFormat::megatron, 1000);
  EXPECT_EQ(read("m2.bin"), Bytes().put_all<std::uint16_t>(all).text);
  EXPECT_EQ(read("m2.idx"), (Index{.code = 8, .lengths = {3, 1}, .pointers = {0, 6}, .documents = {0, 1, 2}}.bytes()));
  written("m4.bin", TokenFormat::megatron, 128256);
  EXPECT_EQ(read("m4.bin"), Bytes().put_all<std::uint32_t>(all).text);
  EXPECT_EQ(read("m4.idx"), (Index{.code = 4, .lengths = {3, 1}, .pointers = {0, 12}, .documents = {0, 1, 2}}.bytes()));
  for (const char* name : {"small.bin", "large.bin", "m2.bin", "m4.bin"})
    EXPECT_EQ(all_of(TokenFile((folder_ / name).string())), all);
}

TEST_F(TokenFileTest, AnUnfinishedFileLeavesNothing) {
  {
    TokenWriter writer({.path = (folder_ / "x.bin").string(), .format = TokenFormat::megatron, .vocab = 10});
    writer.append(Tokens{1, 2});
    EXPECT_THROW(writer.append(Tokens{10}), Error);
    EXPECT_THROW(writer.append(Tokens{-1}), Error);
  }
  {
    TokenWriter writer({.path = (folder_ / "y.bin").string(), .vocab = 10});
    EXPECT_THROW(writer.finish(), Error);
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_THROW(TokenWriter({.path = (folder_ / "x.txt").string(), .vocab = 10}), ConfigError);
  EXPECT_THROW(TokenWriter({.path = (folder_ / "no" / "x.bin").string(), .vocab = 10}), Error);
  write("z.idx", "");
  EXPECT_THROW(TokenWriter({.path = (folder_ / "z.bin").string(), .vocab = 10}), ConfigError);
}

}  // namespace
}  // namespace bonfire::token_test
