#include "bonfire/checkpoint/piece_reader.h"

#include <algorithm>
#include <span>
#include <utility>

#include <ATen/ops/empty.h>

#include "bonfire/checkpoint/scalar_types.h"

namespace bonfire {
namespace {

std::int64_t chunk_length(const ManifestTensor& tensor) {
  return static_cast<std::int64_t>(checksum_bytes) / bytes_of(tensor.type);
}

}  // namespace

std::string described(const std::string& name, const std::string& kind) {
  return name.empty() ? kind : fmt::format("{} ({})", name, kind);
}

Slice whole_slice(const ManifestTensor& tensor) {
  Slice slice;
  slice.name = tensor.name;
  slice.kind = tensor.kind;
  slice.dtype = scalar_type(tensor.type);
  slice.shape = tensor.shape;
  slice.box = whole_box(tensor.shape);
  slice.length = elements_of(slice.box);
  return slice;
}

PieceReader::PieceReader(std::filesystem::path checkpoint, std::size_t keeps)
    : checkpoint_(std::move(checkpoint)), keeps_(keeps) {}

const at::Tensor& PieceReader::chunk(const ManifestTensor& tensor, const StoredPiece& piece, std::int64_t number) {
  if (const auto at = last_.find(&piece); at != last_.end() && at->second.number == number) return at->second.values;
  last_.erase(&piece);
  if (last_.size() >= keeps_) last_.clear();
  const std::int64_t length = chunk_length(tensor), first = number * length;
  const auto values = at::empty({std::min(length, piece.piece.count - first)}, scalar_type(tensor.type));
  const std::span<std::byte> bytes(static_cast<std::byte*>(values.mutable_data_ptr()), values.nbytes());
  const auto begin = piece.offset + static_cast<std::uint64_t>(first * bytes_of(tensor.type));
  try {
    file(piece.file).read(begin, bytes);
  } catch (const Error& error) {
    throw BrokenCheckpoint(error.what());
  }
  if (checksum_of(bytes) != piece.checksums[static_cast<std::size_t>(number)])
    throw BrokenCheckpoint(fmt::format("'{}': bytes {} to {} are not those that were saved ({}): their checksum differs",
                                       (checkpoint_ / piece.file).string(), begin, begin + bytes.size(),
                                       described(tensor.name, tensor.kind)));
  return last_.emplace(&piece, Chunk{number, values}).first->second.values;
}

void PieceReader::read(const ManifestTensor& tensor, const Piece& part, const Take& take) {
  const std::int64_t length = chunk_length(tensor);
  for (const auto& piece : tensor.pieces)
    for_each_common_run(piece.piece, part, [&](const CommonRun& run) {
      for (std::int64_t done = 0; done < run.count;) {
        const std::int64_t from = run.in_one + done, number = from / length;
        const auto& values = chunk(tensor, piece, number);
        const std::int64_t count = std::min(run.count - done, (number + 1) * length - from);
        take(run.in_other + done, values.narrow(0, from - number * length, count));
        done += count;
      }
    });
}

const InputFile& PieceReader::file(const std::string& name) {
  constexpr std::size_t most_open = 32;
  const auto at = files_.find(name);
  if (at != files_.end()) return *at->second;
  if (files_.size() == most_open) files_.clear();
  return *files_.emplace(name, std::make_unique<InputFile>((checkpoint_ / name).string())).first->second;
}

}  // namespace bonfire
