#include "bonfire/checkpoint/rank_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include "bonfire/base/random.h"
#include "bonfire/checkpoint/scalar_types.h"

namespace bonfire {
namespace {

// Ranks that hold the same share its elements if each gets this many bytes or more; of what is smaller one rank writes all.
constexpr std::int64_t least_part = std::int64_t{16} << 10;

// The allocator of pinned memory rounds up to a power of two: of memory in one piece up to half would be unused.
constexpr std::int64_t pinned_block = std::int64_t{64} << 20;

std::int64_t element_bytes(const OwnPiece& piece) { return static_cast<std::int64_t>(elementSize(piece.slice.dtype)); }

// Elements that one checksum covers.
std::int64_t most_in_chunk(const OwnPiece& piece) {
  return static_cast<std::int64_t>(checksum_bytes) / element_bytes(piece);
}

std::uint64_t hash_of(const Slice& slice) {
  return Random(0).fork(fmt::format("{}/{}/{}", slice.kind, slice.name, slice.begin)).key();
}

// By which the file has it: readers that know nothing of pieces see the names of whole tensors.
std::string name_in_file(const OwnPiece& piece) {
  const auto& slice = piece.slice;
  std::string name = slice.name.empty() ? slice.kind : fmt::format("{}/{}", slice.kind, slice.name);
  if (slice.box != whole_box(slice.shape))
    name += fmt::format("@{}:{}", fmt::join(slice.box.begin, ","), fmt::join(slice.box.end, ","));
  if (piece.count != elements_of(slice.box))
    name += fmt::format("[{}:{}]", slice.begin + piece.first, slice.begin + piece.first + piece.count);
  return name;
}

StoredTensor in_file(const OwnPiece& piece) {
  const auto& slice = piece.slice;
  const bool whole = slice.box == whole_box(slice.shape) && piece.count == elements_of(slice.box);
  return {.name = name_in_file(piece),
          .type = stored_type(slice.dtype),
          .shape = whole ? slice.shape : std::vector<std::int64_t>{piece.count}};
}

}  // namespace

std::vector<OwnPiece> own_pieces(std::vector<Slice> slices) {
  std::vector<OwnPiece> pieces;
  for (auto& slice : slices) {
    if (slice.copy >= slice.copies || slice.length == 0) continue;
    const auto bytes = slice.length * static_cast<std::int64_t>(elementSize(slice.dtype));
    const std::int64_t parts = std::clamp<std::int64_t>(bytes / least_part, 1, slice.copies);
    // The first part is not always the same rank's.
    const std::int64_t turn = static_cast<std::int64_t>(hash_of(slice) % static_cast<std::uint64_t>(slice.copies));
    const std::int64_t part = (slice.copy + turn) % slice.copies;
    if (part >= parts) continue;
    const std::int64_t begin = slice.length * part / parts, end = slice.length * (part + 1) / parts;
    pieces.push_back({.slice = std::move(slice), .first = begin, .count = end - begin});
  }
  // So that each tensor begins at a multiple of its elements' size.
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const OwnPiece& a, const OwnPiece& b) { return element_bytes(a) > element_bytes(b); });
  return pieces;
}

std::int64_t bytes_of(const std::vector<OwnPiece>& pieces) {
  std::int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.count * element_bytes(piece);
  return bytes;
}

std::vector<OwnPiece> copied(const std::vector<OwnPiece>& pieces, CopyMemory& memory) {
  auto& blocks = memory.blocks;
  const auto needed = bytes_of(pieces), block = memory.pinned ? std::min(needed, pinned_block) : needed;
  if (!blocks.empty() && blocks.front().numel() < block) blocks.clear();
  std::size_t number = 0;
  std::int64_t place = 0;
  const auto take = [&](std::int64_t bytes) {
    if (number < blocks.size() && bytes > blocks[number].numel() - place) {
      ++number;
      place = 0;
    }
    if (number == blocks.size())
      blocks.push_back(at::empty({block}, at::TensorOptions(at::kByte).pinned_memory(memory.pinned)));
    return blocks[number].narrow(0, std::exchange(place, place + bytes), bytes);
  };
  auto copies = pieces;
  for (auto& copy : copies) {
    auto& slice = copy.slice;
    const std::int64_t most = most_in_chunk(copy);
    for (std::int64_t done = 0; done < copy.count; done += most) {
      const auto bytes = std::min(most, copy.count - done) * element_bytes(copy);
      slice.read(copy.first + done, copy.values.emplace_back(take(bytes).view(slice.dtype)));
    }
    slice.begin += std::exchange(copy.first, 0);
    slice.length = copy.count;
    slice.get = nullptr;
    slice.set = nullptr;
  }
  return copies;
}

std::string rank_file_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }
std::string rank_pieces_name(int rank) { return fmt::format("rank-{:05}.json", rank); }

void write_rank_file(const std::filesystem::path& folder, int rank, const std::vector<OwnPiece>& pieces,
                     const std::function<void()>& between) {
  const std::string file = rank_file_name(rank);
  std::vector<StoredTensor> stored;
  for (const auto& piece : pieces) stored.push_back(in_file(piece));
  SafetensorsWriter writer(folder / file, std::move(stored));

  std::map<std::pair<std::string, std::string>, ManifestTensor> tensors;
  for (std::size_t at = 0; at < pieces.size(); ++at) {
    const auto& [slice, first, count, held] = pieces[at];
    auto& tensor = tensors[{slice.name, slice.kind}];
    tensor.name = slice.name;
    tensor.kind = slice.kind;
    tensor.type = stored_type(slice.dtype);
    tensor.shape = slice.shape;
    StoredPiece told{.piece = {.box = slice.box, .first = slice.begin + first, .count = count},
                     .file = file,
                     .tensor = writer.tensors()[at].name,
                     .offset = writer.data_offset() + writer.tensors()[at].begin};
    const std::int64_t most = most_in_chunk(pieces[at]);
    for (std::int64_t done = 0; done < count; done += most) {
      const std::int64_t next = std::min(most, count - done);
      const auto values = held.empty() ? at::empty({next}, slice.dtype) : held[static_cast<std::size_t>(done / most)];
      if (held.empty()) slice.read(first + done, values);
      const std::span<const std::byte> bytes(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
      told.checksums.push_back(checksum_of(bytes));
      writer.append(bytes);
      if (between) between();
    }
    tensor.pieces.push_back(std::move(told));
  }
  writer.commit();
  std::vector<ManifestTensor> all;
  for (auto& [key, tensor] : tensors) all.push_back(std::move(tensor));
  write_file(folder / rank_pieces_name(rank), pieces_to_json(all));
}

}  // namespace bonfire
