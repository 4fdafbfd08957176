#include "bonfire/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "bonfire/base/random.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

namespace bonfire::manifest_test {
namespace {

using testing::expect_part;
using testing::thrown;

StoredPiece piece(Box box, std::int64_t first, std::int64_t count, std::uint64_t offset = 128) {
  return {.piece = {.box = std::move(box), .first = first, .count = count},
          .file = "rank-00000.safetensors",
          .tensor = "value/weight",
          .offset = offset,
          .checksums = {checksum_of({})}};
}

// Two tensors: one cut in mid-row, the other into columns; and states of every type.
Manifest example() {
  return {.step = 7,
          .configuration = "[run]\nname = \"a \\\"b\\\"\"\n",
          .states = {{"loader", {{"samples", std::int64_t{1} << 62}}},
                     {"scaler", {{"scale", 0.1}, {"whole", 65536.0}, {"words", std::string("so\n")}}}},
          .tensors = {
              {.name = "bias",
               .kind = "value",
               .type = StoredType::bf16,
               .shape = {3, 5},
               .pieces = {piece(whole_box({3, 5}), 0, 7), piece(whole_box({3, 5}), 7, 8, 142)}},
              {.name = "weight",
               .kind = "exp_avg",
               .shape = {4, 6},
               .pieces = {piece({{0, 0}, {4, 2}}, 0, 8), piece({{0, 2}, {4, 6}}, 0, 10), piece({{0, 2}, {4, 6}}, 10, 6)}}}};
}

// As version 1 had it, which has no checksum of its text: what somebody changes in it is looked at.
std::string as_version_1(const Manifest& manifest) {
  auto text = to_json(manifest);
  text.replace(text.find("\"version\": 2"), 12, "\"version\": 1");
  return text.substr(0, text.rfind(",\n \"checksum\"")) + "\n}\n";
}

TEST(Manifests, OneThatNobodyCouldReadIsNotWritten) {
  const auto bytes = to_json(example()).size();
  EXPECT_EQ(to_json(example(), bytes).size(), bytes);
  EXPECT_EQ(thrown<Error>([&] { to_json(example(), bytes - 1); }),
            fmt::format("the manifest of 2 tensors would have {} bytes; allowed: at most {}", bytes, bytes - 1));
}

std::string refusal(const std::function<void(Manifest&)>& change) {
  auto manifest = example();
  change(manifest);
  return thrown<BrokenCheckpoint>([&] { parse_manifest(to_json(manifest), "m.json"); });
}

// Refused in one line that names the file.
std::string refusal_of_text(const std::string& from, const std::string& to) {
  auto text = as_version_1(example());
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << text;
  text.replace(at, from.size(), to);
  const auto words = thrown<ConfigError>([&] { parse_manifest(text, "m.json"); });
  expect_part(words, "m.json");
  EXPECT_EQ(words.find('\n'), std::string::npos) << words;
  return words;
}

TEST(Manifests, SayWhatTheyWereToldToSay) {
  const auto manifest = example();
  EXPECT_EQ(parse_manifest(to_json(manifest), "m.json"), manifest);
  EXPECT_EQ(parse_manifest(as_version_1(manifest), "m.json"), manifest);
  EXPECT_EQ(manifest.find("weight", "exp_avg"), &manifest.tensors[1]);
  EXPECT_EQ(manifest.find("weight", "value"), nullptr);
  EXPECT_EQ(manifest.find("zzz", "value"), nullptr);
  EXPECT_EQ(parse_pieces(pieces_to_json(manifest.tensors), "p.json"), manifest.tensors);
}

TEST(Manifests, ScalarsAndEmptyTensorsAreTensors) {
  auto manifest = example();
  manifest.tensors = {{.name = "", .kind = "steps", .type = StoredType::i64, .pieces = {piece({}, 0, 1)}},
                      {.name = "none", .kind = "value", .shape = {0, 1 << 20}}};
  EXPECT_EQ(parse_manifest(to_json(manifest), "m.json"), manifest);
}

TEST(Manifests, OfOtherVersionsAreRefusedByTheNumberBeforeAnythingElseIsRead) {
  expect_part(refusal_of_text("\"version\": 1", "\"version\": 3, \"whatever\": []"),
              "format version 3; this program reads versions 1 to 2: a newer Bonfire has written it");
  expect_part(refusal_of_text("\"version\": 1", "\"version\": 0"), "format version 0; this program reads versions 1 to 2");
  expect_part(refusal_of_text("bonfire checkpoint", "something else"), "allowed: \"bonfire checkpoint\"");
  expect_part(refusal_of_text("\"version\": 1", "\"version\": 2"), "\"checksum\" is missing");
}

// Also where it is still a manifest: another step, another position in the data.
TEST(Manifests, AnyBitThatIsFlippedIsFound) {
  const auto text = to_json(example());
  for (std::size_t at = 0; at < text.size(); ++at)
    for (const int bit : {0, 1, 4}) {
      auto flipped = text;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << bit));
      EXPECT_NE(thrown<ConfigError>([&] { parse_manifest(flipped, "m.json"); }), "") << at << ": " << flipped.substr(at, 20);
    }
  expect_part(thrown<BrokenCheckpoint>([&] {
                auto flipped = text;
                flipped[flipped.find("\"step\": 7") + 8] = '6';
                parse_manifest(flipped, "m.json");
              }),
              "is not that of the text before it");
}

TEST(Manifests, NameFilesInTheirOwnFolderOnly) {
  for (const char* name : {"../other", "/etc/passwd", "a/b", "..", ".", ""})
    expect_part(refusal([&](Manifest& m) { m.tensors[0].pieces[0].file = name; }), "the checkpoint's own folder");
}

TEST(Manifests, HaveEachElementOnce) {
  expect_part(refusal([](Manifest& m) { m.tensors[0].pieces.pop_back(); }),
              "\"value\" of \"bias\": 8 of its 15 elements are missing");
  expect_part(refusal([](Manifest& m) { m.tensors[0].pieces[1].piece.first = 6; }), "elements are there twice");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[1].piece.count = 11; }), "elements are there twice");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[0].piece.box.end = {4, 3}; }), "two boxes of it overlap");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces.erase(m.tensors[1].pieces.begin()); }), "8 of its 24 elements");
  expect_part(refusal([](Manifest& m) { m.tensors.push_back(m.tensors[0]); }), "\"value\" of \"bias\" is there twice");
}

TEST(Manifests, PiecesAreInsideTheirTensors) {
  expect_part(refusal([](Manifest& m) { m.tensors[0].pieces[1].piece.count = 9; }),
              "9 elements from 7 on of a piece with 15");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[0].piece.box.end = {5, 2}; }), "dimension 0, which has 4");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[0].piece.box.end = {4}; }), "2 and 1 dimensions of one with 2");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[0].piece.box = {{0, 2}, {4, 1}}; }), "[2, 1) of dimension 1");
  expect_part(refusal([](Manifest& m) { m.tensors[1].pieces[0].checksums.clear(); }), "0 for 32 bytes; allowed: 1");
}

TEST(Manifests, NumbersThatOverflowAreRefused) {
  expect_part(refusal_of_text("\"shape\": [\n    3,\n    5", "\"shape\": [\n    4294967296,\n    4294967296"),
              "is larger than any file");
  expect_part(refusal_of_text("\"shape\": [\n    3,", "\"shape\": [\n    -3,"), "allowed: 0 and more");
  expect_part(refusal_of_text("\"offset\": 142", "\"offset\": 9223372036854775807"), "beyond the end of any file");
  expect_part(refusal_of_text("\"count\": 8", "\"count\": 9223372036854775807"), "elements from 7 on");
}

TEST(Manifests, WhatIsNotKnownIsRefused) {
  expect_part(refusal_of_text("\"step\": 7", "\"step\": 7, \"more\": 1"), "\"more\" is not known");
  expect_part(refusal_of_text("\"step\": 7,", ""), "\"step\" is missing");
  expect_part(refusal_of_text("\"BF16\"", "\"BF17\""), "\"BF17\" is not known");
  expect_part(refusal_of_text("\"real\": 0.1", "\"imaginary\": 0.1"), "must be one of");
  expect_part(refusal_of_text("XXH3-64", "MD5"), "allowed: XXH3-64");
}

// Whatever is done to the text: it is read, or refused in one line.
TEST(Manifests, DamagedTextsAreReadOrRefused) {
  const auto text = as_version_1(example());
  Random random(5);
  int refused = 0;
  for (int at = 0; at < 20000; ++at) {
    auto damaged = text;
    const auto draw = [&](std::uint64_t below) {
      return random.fork(static_cast<std::uint64_t>(at)).fork(below).key() % below;
    };
    switch (draw(3)) {
      case 0: damaged[draw(text.size())] = static_cast<char>(draw(256)); break;
      case 1: damaged.erase(draw(text.size()), draw(40)); break;
      default: damaged.insert(draw(text.size()), text.substr(draw(text.size() - 1), draw(60))); break;
    }
    const auto words = thrown<ConfigError>([&] { parse_manifest(damaged, "m.json"); });
    EXPECT_EQ(words.find('\n'), std::string::npos) << words;
    refused += words.empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 10000);
}

TEST(Manifests, AreMadeOfWhatAllRanksSay) {
  const auto whole = example().tensors;
  std::vector<std::vector<ManifestTensor>> of_ranks(3);
  for (std::size_t tensor = 0; tensor < whole.size(); ++tensor)
    for (std::size_t at = 0; at < whole[tensor].pieces.size(); ++at) {
      auto part = whole[tensor];
      part.pieces = {part.pieces[at]};
      of_ranks[at].push_back(part);
    }
  EXPECT_EQ(merge_pieces(of_ranks), whole);
  auto other_shape = of_ranks;
  other_shape[1][0].shape = {5, 3};
  expect_part(thrown<Error>([&] { merge_pieces(other_shape); }),
              "rank 1 saves \"value\" of \"bias\" as BF16 of shape [5, 3]");
  of_ranks.pop_back();
  expect_part(thrown<Error>([&] { merge_pieces(of_ranks); }),
              "\"exp_avg\" of \"weight\" cannot be saved: 6 of its 24 elements");
}

}  // namespace
}  // namespace bonfire::manifest_test
