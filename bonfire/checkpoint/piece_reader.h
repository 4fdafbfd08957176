#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "bonfire/base/input_file.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

// How messages speak of a tensor.
std::string described(const std::string& name, const std::string& kind);

// All of a tensor, of which nobody has said yet where its values are.
Slice whole_slice(const ManifestTensor& tensor);

// The pieces of a checkpoint's tensors, each read through its checksums. What was read last is kept: parts of a tensor
// are often read one after the other. Throws BrokenCheckpoint.
class PieceReader {
 public:
  // Keeps that of so many pieces. Tensors that lie there by columns are read whole from all of these at once.
  static constexpr std::size_t for_columns = 16;
  explicit PieceReader(std::filesystem::path checkpoint, std::size_t keeps = 1);

  // Elements of a piece from a multiple of its checksums' length on, as many as one of these covers.
  const at::Tensor& chunk(const ManifestTensor& tensor, const StoredPiece& piece, std::int64_t number);

  // Hands over all elements of `part`, in as many runs as it takes; `at` counts from its first.
  using Take = std::function<void(std::int64_t at, const at::Tensor& values)>;
  void read(const ManifestTensor& tensor, const Piece& part, const Take& take);

 private:
  const InputFile& file(const std::string& name);

  std::filesystem::path checkpoint_;
  std::size_t keeps_;
  std::map<std::string, std::unique_ptr<InputFile>> files_;
  struct Chunk {
    std::int64_t number = 0;
    at::Tensor values;
  };
  std::map<const StoredPiece*, Chunk> last_;
};

}  // namespace bonfire
