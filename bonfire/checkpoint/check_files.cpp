#include "bonfire/checkpoint/check_files.h"

#include <utility>
#include <vector>

#include "bonfire/checkpoint/safetensors.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

struct Expected {
  const ManifestTensor* tensor;
  const StoredPiece* piece;
};

void check_file(const std::string& path, const std::vector<Expected>& all) {
  const SafetensorsFile file(path);
  for (const auto& [tensor, piece] : all) {
    const auto* found = file.find(piece->tensor);
    if (found == nullptr) fail_config("'{}': has no tensor \"{}\", which the manifest has", path, piece->tensor);
    const auto bytes = static_cast<std::uint64_t>(piece->piece.count * bytes_of(tensor->type));
    if (found->type != tensor->type || found->bytes != bytes || file.data_offset() + found->begin != piece->offset ||
        (found->shape != tensor->shape && found->shape != Shape{piece->piece.count}))
      fail_config("'{}': its header has tensor \"{}\" with another dtype, shape or place than the manifest", path,
                  piece->tensor);
  }
}

}  // namespace

std::map<std::string, std::string> problems_of_files(const fs::path& checkpoint, const Manifest& manifest,
                                                     const FilesToCheck& which) {
  std::map<std::string, std::vector<Expected>> files;
  for (const auto& tensor : manifest.tensors)
    for (const auto& piece : tensor.pieces) files[piece.file].push_back({&tensor, &piece});
  std::map<std::string, std::string> problems;
  int number = 0;
  for (const auto& [name, expected] : files) {
    if (number++ % which.every != which.first) continue;
    try {
      check_file((checkpoint / name).string(), expected);
    } catch (const Error& error) {
      problems.emplace(name, error.what());
    }
  }
  return problems;
}

void check_files(const fs::path& checkpoint, const Manifest& manifest, const FilesToCheck& which) {
  const auto problems = problems_of_files(checkpoint, manifest, which);
  if (!problems.empty()) throw BrokenCheckpoint(problems.begin()->second);
}

}  // namespace bonfire
