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

std::int64_t element_bytes(const OwnPiece& piece) { return static_cast<std::int64_t>(elementSize(piece.slice.dtype)); }

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

std::vector<OwnPiece> copied(const std::vector<OwnPiece>& pieces, at::Tensor& memory) {
  auto copies = pieces;
  if (const auto needed = bytes_of(pieces); !memory.defined() || memory.numel() < needed) {
    memory.reset();
    memory = at::empty({needed}, at::kByte);
  }
  std::int64_t place = 0;
  for (auto& [slice, first, count, values] : copies) {
    const auto bytes = count * static_cast<std::int64_t>(elementSize(slice.dtype));
    values = memory.narrow(0, place, bytes).view(slice.dtype);
    slice.read(first, values);
    place += bytes;
    slice.begin += std::exchange(first, 0);
    slice.length = count;
    slice.get = getter(values);
    slice.set = nullptr;
  }
  return copies;
}

std::string rank_file_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }
std::string rank_pieces_name(int rank) { return fmt::format("rank-{:05}.json", rank); }

void write_rank_file(const std::filesystem::path& folder, int rank, const std::vector<OwnPiece>& pieces) {
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
    const std::int64_t most = static_cast<std::int64_t>(checksum_bytes) / element_bytes(pieces[at]);
    for (std::int64_t done = 0; done < count; done += most) {
      const std::int64_t next = std::min(most, count - done);
      const auto values = held.defined() ? held.narrow(0, done, next) : at::empty({next}, slice.dtype);
      if (!held.defined()) slice.read(first + done, values);
      const std::span<const std::byte> bytes(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
      told.checksums.push_back(checksum_of(bytes));
      writer.append(bytes);
    }
    tensor.pieces.push_back(std::move(told));
  }
  writer.commit();
  std::vector<ManifestTensor> all;
  for (auto& [key, tensor] : tensors) all.push_back(std::move(tensor));
  write_file(folder / rank_pieces_name(rank), pieces_to_json(all));
}

}  // namespace bonfire
