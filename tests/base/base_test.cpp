#include <gtest/gtest.h>

#include <cmath>
#include <regex>

#include "bonfire/base/collective.h"
#include "bonfire/base/error.h"
#include "bonfire/base/log.h"
#include "bonfire/base/random.h"
#include "bonfire/base/size.h"
#include "bonfire/base/trace.h"

namespace bonfire::base_test {
namespace {

// Known answer of Philox 4x32-10 (Random123's kat_vectors: counter 0, key 0, and all ones).
TEST(Random, MatchesThePublishedVectors) {
  const auto zeros = Random(0).block(0);
  EXPECT_EQ(zeros, (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(Random, ValuesDependOnKeyAndIndexOnly) {
  const Random a = Random(7).fork("layers.0.weight"), b = Random(7).fork("layers.0.weight");
  EXPECT_EQ(a.bits(1000), b.bits(1000));
  EXPECT_NE(a.bits(1000), a.bits(1001));
  EXPECT_NE(a.bits(1000), Random(7).fork("layers.1.weight").bits(1000));
  EXPECT_NE(a.bits(1000), Random(8).fork("layers.0.weight").bits(1000));
}

TEST(Random, NormalHasTheRightMoments) {
  const Random random(3);
  double sum = 0, squares = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = random.normal(i);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.02);
  EXPECT_NEAR(squares / n, 1, 0.02);
}

TEST(Random, BelowStaysBelow) {
  const Random random(3);
  std::array<int, 5> seen{};
  for (int i = 0; i < 5000; ++i) ++seen.at(random.below(i, 5));
  for (const int count : seen) EXPECT_NEAR(count, 1000, 150);
}

TEST(Size, Formats) {
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(parse_bytes("2GiB"), std::int64_t{2} << 30);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 1572864);
  EXPECT_EQ(parse_bytes("17"), 17);
  for (const char* none : {"", "GiB", "2GB", "2 GiB ", "-1", "0.3", "1e99", "9000PiB", "nan", "2  KiB"})
    EXPECT_EQ(parse_bytes(none), std::nullopt) << none;
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1025}, std::int64_t{3} << 30, std::int64_t{5} << 50})
    EXPECT_EQ(parse_bytes(exact_bytes(bytes)), bytes);
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-999), "-999");
  EXPECT_EQ(format_seconds(245), "4 min 05 s");
  EXPECT_EQ(round_up(10, 8), 16);
  EXPECT_EQ(round_up(16, 8), 16);
}

TEST(Collective, BusBytesOfARing) {
  EXPECT_DOUBLE_EQ(bus_factor(CollectiveKind::all_reduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(CollectiveKind::all_gather, 4), 0.75);
  const Link link{.latency_seconds = 1e-3, .bytes_per_second = 1e6};
  EXPECT_DOUBLE_EQ(seconds_over(link, {CollectiveKind::all_reduce, Axis::replicate, 1'000'000}, 2), 1.001);
  EXPECT_DOUBLE_EQ(seconds_over(link, {CollectiveKind::all_reduce, Axis::replicate, 1'000'000}, 1), 0);
}

TEST(Error, NamesTheThing) {
  try {
    require(false, "layout.shard is {}, must divide {}", 3, 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "layout.shard is 3, must divide 4");
  }
  EXPECT_THROW(fail_config("x"), ConfigError);
}

TEST(Log, ALineCarriesDateAndTime) {
  ::testing::internal::CaptureStderr();
  Log().info("{} words", 2);
  const std::string line = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(
      std::regex_match(line, std::regex("20[0-9]{2}-[01][0-9]-[0-3][0-9] [0-2][0-9]:[0-5][0-9]:[0-6][0-9] info 2 words\n")))
      << line;
}

TEST(Trace, WritesEventsPerTrack) {
  Trace trace(3);
  trace.add({"forward", "compute", "compute", 2000, 5000, 0});
  trace.add({"all_reduce", "communication", "replicate", 1000, 4000, 64});
  const auto text = Trace::file({trace.events()});
  EXPECT_NE(text.find(R"("dur":3.0)"), std::string::npos);
  EXPECT_NE(text.find(R"("bytes":64)"), std::string::npos);
  EXPECT_NE(text.find(R"("name":"rank 3")"), std::string::npos);
}

}  // namespace
}  // namespace bonfire::base_test
