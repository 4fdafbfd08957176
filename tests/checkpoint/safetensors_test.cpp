#include "bonfire/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <random>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::safetensors_test {
namespace {

using bonfire::testing::Folder;
using bonfire::testing::thrown;

std::vector<std::byte> some_bytes(std::size_t count, int first) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

std::vector<std::byte> content(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (!tensor) return {};
  std::vector<std::byte> bytes(tensor->bytes);
  file.read(*tensor, 0, bytes);
  return bytes;
}

class Safetensors : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  // A file of a header as it is given, and so many bytes of data.
  std::string raw(std::string_view header, std::size_t data, std::uint64_t length) const {
    std::ofstream file(at("raw"), std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file << header << std::string(data, 'x');
    file.close();
    return at("raw");
  }
  std::string raw(std::string_view header, std::size_t data) const { return raw(header, data, header.size()); }
  std::string refusal(const std::string& path) const {
    return thrown<ConfigError>([&] { SafetensorsFile file(path); });
  }

  Folder folder_;
};

TEST_F(Safetensors, ComeBackAsTheyWereWritten) {
  const auto weight = some_bytes(24, 1), scalar = some_bytes(8, 90), bias = some_bytes(6, 40);
  {
    SafetensorsWriter writer(at("model.safetensors"),
                             {{.name = "weight", .type = StoredType::f32, .shape = {2, 3}},
                              {.name = "step", .type = StoredType::i64},
                              {.name = "nothing", .type = StoredType::bf16, .shape = {4, 0}},
                              {.name = "bias \"ü\"\n", .type = StoredType::bf16, .shape = {3}}},
                             {{"format", "pt"}, {"step", "7"}});
    EXPECT_EQ(writer.data_offset() % 8, 0u);
    writer.append(weight);
    // Pieces need not end where tensors do.
    auto rest = scalar;
    rest.insert(rest.end(), bias.begin(), bias.end());
    writer.append(std::span(rest).first(3));
    writer.append(std::span(rest).subspan(3));
    EXPECT_FALSE(std::filesystem::exists(at("model.safetensors")));
    writer.commit();
  }
  const SafetensorsFile file(at("model.safetensors"));
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.metadata(), (StoredMetadata{{"format", "pt"}, {"step", "7"}}));
  EXPECT_EQ(content(file, "weight"), weight);
  EXPECT_EQ(content(file, "step"), scalar);
  EXPECT_EQ(content(file, "bias \"ü\"\n"), bias);
  EXPECT_EQ(file.find("nothing")->bytes, 0u);
  EXPECT_EQ(file.find("nothing")->shape, (std::vector<std::int64_t>{4, 0}));
  EXPECT_TRUE(file.find("step")->shape.empty());
  EXPECT_EQ(file.find("weights"), nullptr);
  std::vector<std::byte> part(5);
  file.read(*file.find("weight"), 7, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), weight.begin() + 7));
  EXPECT_THROW(file.read(*file.find("weight"), 20, part), Error);
}

TEST_F(Safetensors, OfNoTensorsAreFiles) {
  SafetensorsWriter(at("empty"), {}).commit();
  EXPECT_TRUE(SafetensorsFile(at("empty")).tensors().empty());
}

TEST_F(Safetensors, HaveNoNameUntilAllBytesHaveCome) {
  SafetensorsWriter writer(at("short"), {{.name = "a", .type = StoredType::u8, .shape = {4}}});
  writer.append(some_bytes(3, 0));
  EXPECT_THROW(writer.commit(), Error);
  EXPECT_FALSE(std::filesystem::exists(at("short")));
  EXPECT_THROW(writer.append(some_bytes(2, 0)), Error);
  writer.append(some_bytes(1, 3));
  writer.commit();
  EXPECT_EQ(content(SafetensorsFile(at("short")), "a"),
            (std::vector<std::byte>{std::byte(0), std::byte(1), std::byte(2), std::byte(3)}));
}

TEST_F(Safetensors, NamesAreWrittenOnce) {
  const StoredTensor one{.name = "a", .type = StoredType::u8};
  EXPECT_THROW(SafetensorsWriter(at("twice"), {one, one}), Error);
  EXPECT_THROW(SafetensorsWriter(at("meta"), {{.name = "__metadata__", .type = StoredType::u8}}), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// As other programs write them: in any order, padded, with dtypes that we never write.
TEST_F(Safetensors, OfOthersAreRead) {
  const SafetensorsFile file(raw(R"({"b":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[4,6]},"__metadata__":{"a":"b"},)"
                                 R"("a":{"dtype":"U16","shape":[1,2],"data_offsets":[0,4]}}   )",
                                 6));
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(name_of(file.find("b")->type), "F8_E4M3");
}

TEST_F(Safetensors, EveryTypeHasItsSize) {
  std::string header = "{";
  std::uint64_t end = 0;
  const std::vector<std::pair<std::string, std::uint64_t>> all = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"F64", 8},     {"I64", 8}, {"U64", 8}};
  for (const auto& [type, bytes] : all) {
    header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[3],"data_offsets":[{},{}]}})", end == 0 ? "" : ",", type, type,
                          end, end + 3 * bytes);
    end += 3 * bytes;
  }
  const SafetensorsFile file(raw(header + "}", end));
  for (const auto& [type, bytes] : all) {
    EXPECT_EQ(name_of(file.find(type)->type), type);
    EXPECT_EQ(static_cast<std::uint64_t>(bytes_of(file.find(type)->type)), bytes);
  }
}

TEST_F(Safetensors, BadFilesAreRefusedWithTheReason) {
  const auto one = [](std::string_view rest) { return fmt::format(R"({{"a":{{"dtype":"F32",{}}}}})", rest); };
  const auto expect = [&](const std::string& path, const std::string& words) {
    const std::string said = refusal(path);
    EXPECT_NE(said.find(words), std::string::npos) << said;
    EXPECT_NE(said.find("raw"), std::string::npos) << said;
  };
  expect(raw("{}", 0, std::uint64_t{1} << 60), "a header of 1152921504606846976 bytes; allowed: at most 100000000");
  expect(raw("{}", 0, 3), "cut short: a header of 3 bytes in a file of 10 bytes");
  expect(raw("", 0), "no safetensors file");
  expect(raw(" {}", 0), "no safetensors file");
  expect(raw("{", 0), "not JSON");
  expect(raw("{\"a\xff\":1}", 0), "not JSON");
  expect(raw("{}", 1), "its tensors have 0 bytes of data, the file has 1");
  expect(raw(one(R"("shape":[1],"data_offsets":[0,4]})") + "", 4), "not JSON");
  expect(
      raw(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
          4),
      "not JSON");
  expect(raw(one(R"("shape":[2],"data_offsets":[0,4])"), 4), "are 4 bytes; a tensor of shape [2] in F32 has 8");
  expect(raw(one(R"("shape":[4294967296,4294967296],"data_offsets":[0,4])"), 4), "is larger than any file");
  expect(raw(one(R"("shape":[-1],"data_offsets":[0,4])"), 4), "is -1; allowed: 0 and more");
  expect(raw(one(R"("shape":[1.5],"data_offsets":[0,4])"), 4), "raw:1:");
  expect(raw(one(R"("shape":[1],"data_offsets":[4,0])"), 4), "ends at 0 before it begins at 4");
  expect(raw(one(R"("shape":[1],"data_offsets":[0])"), 4), "has 1 numbers; allowed: 2");
  expect(raw(one(R"("shape":[1],"data_offsets":[4,8])"), 8), "begins at byte 4 of the data; allowed: 0");
  expect(raw(one(R"("shape":[1],"data_offsets":[0,4],"code":"x")"), 4), "\"code\" is not known");
  expect(raw(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4),
         "dtype \"F33\" is not known; allowed: BOOL | U8");
  expect(
      raw(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})", 5),
      "\"b\" begins at byte 2 of the data; allowed: 3");
  expect(raw(R"({"__metadata__":{"a":1}})", 0), "raw:1:");
  std::ofstream(at("raw"), std::ios::binary) << "abc";
  expect(at("raw"), "cut short");
  EXPECT_NE(refusal(at("missing")).find("missing"), std::string::npos);
}

// Whatever a header becomes by chance is read or refused, and never more.
TEST_F(Safetensors, DamagedHeadersAreReadOrRefused) {
  const std::string header = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                             R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
  std::mt19937_64 random(7);
  int refused = 0;
  for (int turn = 0; turn < 20000; ++turn) {
    std::string damaged = header;
    for (std::uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
      const auto place = random() % damaged.size();
      switch (random() % 3) {
        case 0: damaged[place] = static_cast<char>(random() % 256); break;
        case 1: damaged.erase(place, 1 + random() % 4); break;
        default: damaged.insert(place, 1, "0123456789[]{},:\"-e."[random() % 20]);
      }
      if (damaged.empty()) damaged = " ";
    }
    try {
      const auto parsed = parse_safetensors(damaged, 26, "damaged");
      EXPECT_EQ(std::accumulate(parsed.tensors.begin(), parsed.tensors.end(), std::uint64_t{0},
                                [](std::uint64_t sum, const StoredTensor& tensor) { return sum + tensor.bytes; }),
                26u);
    } catch (const ConfigError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace bonfire::safetensors_test
