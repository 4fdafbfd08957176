#include "bonfire/train/tensorboard.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <regex>
#include <stdexcept>
#include <vector>

namespace bonfire::tensorboard_test {
namespace {

namespace fs = std::filesystem;

// A reader that shares nothing with the writer: a bit-wise CRC, and fields by their numbers.
std::uint32_t slow_crc(const std::string& data) {
  std::uint32_t crc = 0xffffffff;
  for (const unsigned char byte : data)
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (((crc ^ (byte >> bit)) & 1) != 0 ? 0x82f63b78 : 0);
  return crc ^ 0xffffffff;
}

std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8; }

struct Reader {
  std::string data;
  std::size_t at = 0;

  bool done() const { return at == data.size(); }
  std::string take(std::size_t size) {
    if (size > data.size() - at) throw std::runtime_error("cut short");
    at += size;
    return data.substr(at - size, size);
  }
  template <class T>
  T fixed() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  }
  std::string record() {
    const auto length = take(8);
    if (fixed<std::uint32_t>() != masked(slow_crc(length))) throw std::runtime_error("bad crc of the length");
    const auto event = take(Reader{length}.fixed<std::uint64_t>());
    if (fixed<std::uint32_t>() != masked(slow_crc(event))) throw std::runtime_error("bad crc of the event");
    return event;
  }
};

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  std::map<std::string, float> scalars;
};

Event parse(const std::string& bytes) {
  Event event;
  for (Reader reader{bytes}; !reader.done();) {
    const auto key = reader.varint();
    if (key == 0x09) {
      event.wall_time = reader.fixed<double>();
    } else if (key == 0x10) {
      event.step = static_cast<std::int64_t>(reader.varint());
    } else if (key == 0x1a) {
      event.version = reader.take(reader.varint());
    } else if (key == 0x2a) {
      for (Reader summary{reader.take(reader.varint())}; !summary.done();) {
        if (summary.varint() != 0x0a) throw std::runtime_error("a summary holds values");
        Reader value{summary.take(summary.varint())};
        if (value.varint() != 0x0a) throw std::runtime_error("a value begins with its tag");
        const auto tag = value.take(value.varint());
        if (value.varint() != 0x15) throw std::runtime_error("a value is simple");
        event.scalars[tag] = value.fixed<float>();
        if (!value.done()) throw std::runtime_error("a value has two fields");
      }
    } else {
      throw std::runtime_error("unknown field");
    }
  }
  return event;
}

class Events : public ::testing::Test {
 protected:
  Events() {
    auto pattern = (fs::temp_directory_path() / "bonfire-events-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~Events() override { fs::remove_all(folder_); }

  static std::vector<Event> read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    Reader reader{std::string(std::istreambuf_iterator<char>(file), {})};
    std::vector<Event> events;
    while (!reader.done()) events.push_back(parse(reader.record()));
    return events;
  }

  fs::path folder_;
};

// RFC 3720, B.4.
TEST(Crc32c, MatchesThePublishedVectors) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  std::string rising, falling;
  for (int at = 0; at < 32; ++at) rising += static_cast<char>(at), falling += static_cast<char>(31 - at);
  EXPECT_EQ(crc32c(rising), 0x46dd794eU);
  EXPECT_EQ(crc32c(falling), 0x113fdb5cU);
  EXPECT_EQ(crc32c(""), 0U);
}

TEST_F(Events, AnotherReaderFindsWhatWasWritten) {
  EventWriter writer(folder_ / "a" / "b");
  const auto name = writer.path().filename().string();
  EXPECT_TRUE(std::regex_match(name, std::regex(R"(events\.out\.tfevents\.\d{10}\..+\.\d+\.\d+)"))) << name;
  writer.scalars(1, {{"loss", 4.125}, {"lr", 3e-4}});
  writer.scalars(1'000'000'000'000, {{"loss", -0.5}});
  writer.scalars(0, {{std::string(300, 'x'), 1e30}});

  // Without closing: a record is on the disk when it is written.
  const auto events = read(writer.path());
  ASSERT_EQ(events.size(), 4);
  EXPECT_EQ(events[0].version, "brain.Event:2");
  EXPECT_TRUE(events[0].scalars.empty());
  EXPECT_EQ(events[1].step, 1);
  EXPECT_EQ(events[1].scalars, (std::map<std::string, float>{{"loss", 4.125F}, {"lr", 3e-4F}}));
  EXPECT_EQ(events[2].step, 1'000'000'000'000);
  EXPECT_EQ(events[2].scalars, (std::map<std::string, float>{{"loss", -0.5F}}));
  EXPECT_EQ(events[3].scalars, (std::map<std::string, float>{{std::string(300, 'x'), 1e30F}}));
  const auto now = static_cast<double>(std::time(nullptr));
  for (const auto& event : events) EXPECT_NEAR(event.wall_time, now, 60);
}

TEST_F(Events, TwoWritersOfOneSecondHaveTwoFiles) {
  EventWriter first(folder_), second(folder_);
  EXPECT_NE(first.path(), second.path());
  first.scalars(1, {{"a", 1}});
  second.scalars(1, {{"b", 2}});
  EXPECT_EQ(read(first.path()).at(1).scalars.count("a"), 1);
  EXPECT_EQ(read(second.path()).at(1).scalars.count("b"), 1);
}

}  // namespace
}  // namespace bonfire::tensorboard_test
