#include "bonfire/checkpoint/reshard.h"

#include <algorithm>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bonfire/base/json.h"
#include "bonfire/base/look.h"
#include "bonfire/base/output_file.h"
#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/piece_reader.h"
#include "bonfire/checkpoint/rank_file.h"
#include "bonfire/checkpoint/scalar_types.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// All of a tensor, which is read when it is written.
Slice slice_of(PieceReader& reader, const ManifestTensor& tensor, const ReshardOptions& options) {
  Slice slice = whole_slice(tensor);
  slice.get = [&](std::int64_t at, const at::Tensor& values) {
    reader.read(tensor, {.box = whole_box(tensor.shape), .first = at, .count = values.numel()},
                [&](std::int64_t in_part, const at::Tensor& read) { values.narrow(0, in_part, read.numel()).copy_(read); });
    if (options.change) options.change(tensor, at, values);
    if (options.progress) options.progress(values.nbytes());
  };
  return slice;
}

// Tensors one after the other, cut where a part has its share of all bytes.
std::vector<std::vector<OwnPiece>> cut(PieceReader& reader, const Manifest& manifest, const ReshardOptions& options) {
  std::vector<const ManifestTensor*> order;
  for (const auto& tensor : manifest.tensors)
    if (!options.wanted || options.wanted(tensor)) order.push_back(&tensor);
  // So that each begins at a multiple of its elements' size.
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return bytes_of(a->type) > bytes_of(b->type); });
  std::int64_t all = 0;
  for (const auto* tensor : order) all += elements_of(whole_box(tensor->shape)) * bytes_of(tensor->type);

  std::vector<std::vector<OwnPiece>> parts(static_cast<std::size_t>(options.parts));
  std::int64_t before = 0;
  for (const auto* tensor : order) {
    const std::int64_t each = bytes_of(tensor->type), elements = elements_of(whole_box(tensor->shape));
    std::int64_t first = 0;
    for (std::int64_t part = 0; part < options.parts; ++part) {
      // Without a product that overflows.
      const std::int64_t end = all / options.parts * (part + 1) + all % options.parts * (part + 1) / options.parts;
      const std::int64_t last = part + 1 == options.parts ? elements : std::clamp((end - before) / each, first, elements);
      if (last > first)
        parts[static_cast<std::size_t>(part)].push_back(
            {.slice = slice_of(reader, *tensor, options), .first = first, .count = last - first});
      first = last;
    }
    before += elements * each;
  }
  return parts;
}

}  // namespace

void reshard_checkpoint(const fs::path& from, const fs::path& to, const ReshardOptions& options) {
  if (options.parts < 1 || options.parts > 100000)
    fail_config("a checkpoint in {} parts; allowed: 1 to 100000", options.parts);
  if (is_there(to)) fail_config("'{}' exists already; allowed: a folder that does not", to.string());
  Manifest manifest = read_manifest(from);
  check_files(from, manifest);
  PieceReader reader(from, PieceReader::for_columns);
  const auto parts = cut(reader, manifest, options);
  const fs::path final = to.has_filename() ? to : to.parent_path();
  fs::path unfinished = final;
  // A name of its own: what lies beside may be somebody else's.
  unfinished += fmt::format(".{:08x}.part", std::random_device()());
  std::error_code refused;
  if (final.has_parent_path()) fs::create_directories(final.parent_path(), refused);
  const bool made = !refused && fs::create_directory(unfinished, refused);
  if (!made) fail_config("'{}' cannot be made: {}", unfinished.string(), refused ? refused.message() : "it exists already");
  try {
    std::vector<std::vector<ManifestTensor>> of_parts;
    for (int part = 0; part < options.parts; ++part) {
      write_rank_file(unfinished, part, parts[static_cast<std::size_t>(part)]);
      const fs::path pieces = unfinished / rank_pieces_name(part);
      of_parts.push_back(parse_pieces(InputFile(pieces.string()).text(most_json_bytes), pieces.string()));
      fs::remove(pieces);
    }
    manifest.tensors = merge_pieces(of_parts);
    if (!options.states) manifest.states.clear();
    write_file(unfinished / manifest_name, to_json(manifest));
    fs::rename(unfinished, final);
    flush_folder(final);
  } catch (...) {
    fs::remove_all(unfinished, refused);
    throw;
  }
}

}  // namespace bonfire
