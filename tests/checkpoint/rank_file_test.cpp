// Slices made by hand: what each rank writes of them, and reading them back as other boxes.
#include "bonfire/checkpoint/rank_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/base/json.h"
#include "bonfire/checkpoint/load.h"
#include "tests/support/shell.h"

namespace bonfire::rank_file_test {
namespace {

using testing::Folder;

// Part of a tensor that a rank holds: elements [begin, begin + length) of a box.
Slice slice_of(const at::Tensor& part, const std::vector<std::int64_t>& shape, Box box, std::int64_t begin = 0) {
  Slice slice;
  slice.name = "weight";
  slice.kind = "value";
  slice.dtype = part.scalar_type();
  slice.shape = shape;
  slice.box = std::move(box);
  slice.begin = begin;
  slice.length = part.numel();
  slice.get = getter(part);
  slice.set = setter(part);
  return slice;
}

at::Tensor in_box(const at::Tensor& whole, const Box& box) {
  auto part = whole;
  for (std::size_t dim = 0; dim < box.begin.size(); ++dim)
    part = part.slice(static_cast<std::int64_t>(dim), box.begin[dim], box.end[dim]);
  return part.reshape({-1});
}

void save(const std::filesystem::path& folder, const std::vector<std::vector<Slice>>& of_ranks) {
  std::vector<std::vector<ManifestTensor>> told;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const int number = static_cast<int>(rank);
    write_rank_file(folder, number, own_pieces(of_ranks[rank]));
    const auto name = (folder / rank_pieces_name(number)).string();
    told.push_back(parse_pieces(InputFile(name).text(most_json_bytes), name));
  }
  write_file(folder / manifest_name, to_json(Manifest{.tensors = merge_pieces(told)}));
}

using Boxes = std::vector<Box>;

// Rows, columns, and q, k and v that lie behind one another in a packed weight, of which each rank has some heads.
const std::vector<Boxes>& ways_to_split() {
  static const std::vector<Boxes> ways{
      {{{0, 0}, {12, 10}}},
      {{{0, 0}, {5, 10}}, {{5, 0}, {12, 10}}},
      {{{0, 0}, {12, 3}}, {{0, 3}, {12, 4}}, {{0, 4}, {12, 10}}},
      {{{0, 0}, {2, 10}}, {{2, 0}, {4, 10}}, {{4, 0}, {6, 10}}, {{6, 0}, {8, 10}}, {{8, 0}, {10, 10}}, {{10, 0}, {12, 10}}},
      {{{0, 0}, {7, 4}}, {{7, 0}, {12, 4}}, {{0, 4}, {12, 10}}}};
  return ways;
}

TEST(RankFiles, BoxesAreReadAsOtherBoxes) {
  const auto whole = at::arange(120, at::kDouble).view({12, 10});
  for (const auto& from : ways_to_split()) {
    const Folder folder;
    std::vector<std::vector<Slice>> of_ranks;
    for (const auto& box : from) {
      // Each box is cut once more, in mid-row.
      const auto part = in_box(whole, box);
      const auto cut = part.numel() * 2 / 3;
      of_ranks.push_back({slice_of(part.narrow(0, 0, cut), {12, 10}, box)});
      of_ranks.push_back({slice_of(part.narrow(0, cut, part.numel() - cut), {12, 10}, box, cut)});
    }
    save(folder.path(), of_ranks);
    EXPECT_EQ(verify_checkpoint(folder.path()), std::vector<std::string>());
    const auto manifest = read_manifest(folder.path());
    for (const auto& to : ways_to_split())
      for (const auto& box : to) {
        const auto expected = in_box(whole, box);
        auto part = at::zeros_like(expected);
        load_slices(folder.path(), manifest, {slice_of(part, {12, 10}, box)});
        EXPECT_TRUE(part.equal(expected)) << part;
        // In another type, and some of it only.
        auto some = at::zeros({expected.numel() / 2}, at::kFloat);
        load_slices(folder.path(), manifest, {slice_of(some, {12, 10}, box, 3)});
        EXPECT_TRUE(some.equal(expected.narrow(0, 3, some.numel()).to(at::kFloat)));
      }
  }
}

// Longer than what one checksum covers.
TEST(RankFiles, LongTensorsHaveAChecksumForEachStretch) {
  const std::int64_t elements = 5 * static_cast<std::int64_t>(checksum_bytes) / 8 / 2 + 3;
  const auto whole = at::arange(elements, at::kDouble);
  const Folder folder;
  save(folder.path(), {{slice_of(whole, {elements}, whole_box({elements}))}});
  const auto manifest = read_manifest(folder.path());
  EXPECT_EQ(manifest.tensors.at(0).pieces.at(0).checksums.size(), 3u);
  for (const std::int64_t begin : {std::int64_t{0}, elements / 3, elements - 5}) {
    auto part = at::zeros({elements - begin}, at::kDouble);
    load_slices(folder.path(), manifest, {slice_of(part, {elements}, whole_box({elements}), begin)});
    EXPECT_TRUE(part.equal(whole.narrow(0, begin, part.numel())));
  }
}

TEST(RankFiles, HoldersOfTheSameShareTheWork) {
  constexpr int ranks = 5;
  std::vector<at::Tensor> tensors;
  for (int at = 0; at < 60; ++at) tensors.push_back(at::full({at % 3 == 0 ? 40000 + at : 300 + at}, at, at::kFloat));
  std::vector<std::vector<Slice>> of_ranks(ranks);
  for (int rank = 0; rank < ranks; ++rank)
    for (std::size_t at = 0; at < tensors.size(); ++at) {
      auto slice = slice_of(tensors[at], {tensors[at].numel()}, whole_box({tensors[at].numel()}));
      slice.name = fmt::format("weight{}", at);
      slice.copy = rank;
      slice.copies = ranks;
      of_ranks[static_cast<std::size_t>(rank)].push_back(slice);
    }
  // A copy beyond those that share the work, as of a weight that is tied to another stage's.
  of_ranks.push_back(of_ranks.front());
  for (auto& slice : of_ranks.back()) slice.copy = ranks;

  std::vector<std::int64_t> bytes;
  for (const auto& slices : of_ranks) bytes.push_back(bytes_of(own_pieces(slices)));
  EXPECT_EQ(bytes.back(), 0);
  bytes.pop_back();
  const auto all = std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  EXPECT_LE(static_cast<double>(*std::max_element(bytes.begin(), bytes.end())), 1.1 * static_cast<double>(all) / ranks);

  const Folder folder;
  save(folder.path(), of_ranks);  // which finds each element once
  EXPECT_EQ(read_manifest(folder.path()).tensors.size(), tensors.size());
}

TEST(RankFiles, CopiesAreOfTheMomentAtWhichTheyWereMade) {
  auto values = at::arange(100, at::kDouble);
  const auto pieces = own_pieces({slice_of(values, {100}, whole_box({100}))});
  CopyMemory memory;
  const auto copies = copied(pieces, memory);
  values.zero_();
  ASSERT_EQ(copies.size(), 1u);
  ASSERT_EQ(copies[0].values.size(), 1u);
  EXPECT_TRUE(copies[0].values[0].equal(at::arange(100, at::kDouble)));
  // The next ones may lie in the same memory, where it is large enough.
  ASSERT_EQ(memory.blocks.size(), 1u);
  const auto* before = memory.blocks[0].const_data_ptr();
  copied(pieces, memory);
  EXPECT_EQ(memory.blocks[0].const_data_ptr(), before);
  copied(own_pieces({slice_of(at::ones({200}, at::kDouble), {200}, whole_box({200}))}), memory);
  ASSERT_EQ(memory.blocks.size(), 1u);
  EXPECT_EQ(memory.blocks[0].numel(), 1600);
}

// What is written of a copy is what is written without one.
TEST(RankFiles, CopiesOfLongTensorsAreWrittenTheSame) {
  const std::int64_t elements = 5 * static_cast<std::int64_t>(checksum_bytes) / 8 / 2 + 3;
  const auto whole = at::arange(elements, at::kDouble), more = at::arange(elements, at::kFloat);
  auto other = slice_of(more, {elements}, whole_box({elements}));
  other.name = "other";
  const auto pieces = own_pieces({slice_of(whole, {elements}, whole_box({elements})), other});
  const Folder plain, copy;
  CopyMemory memory;
  int calls = 0;
  write_rank_file(plain.path(), 0, pieces);
  write_rank_file(copy.path(), 0, copied(pieces, memory), [&] { ++calls; });
  EXPECT_EQ(calls, 5);
  for (const auto& file : {rank_file_name(0), rank_pieces_name(0)}) EXPECT_EQ(copy.read(file), plain.read(file)) << file;
}

TEST(RankFiles, TheDtypeOfEveryTensorIsKept) {
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                          at::kFloat, at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const Folder folder;
    const auto values = at::arange(6, at::kFloat).to(type);
    save(folder.path(), {{slice_of(values, {2, 3}, whole_box({2, 3}))}});
    const SafetensorsFile file(folder / "rank-00000.safetensors");
    ASSERT_EQ(file.tensors().size(), 1u);
    EXPECT_EQ(file.tensors()[0].name, "value/weight");
    EXPECT_EQ(file.tensors()[0].shape, (std::vector<std::int64_t>{2, 3}));
    auto loaded = at::zeros({6}, at::kFloat).to(type);
    load_slices(folder.path(), read_manifest(folder.path()), {slice_of(loaded, {2, 3}, whole_box({2, 3}))});
    EXPECT_TRUE(loaded.to(at::kFloat).equal(values.to(at::kFloat))) << toString(type);
  }
}

}  // namespace
}  // namespace bonfire::rank_file_test
