#include "bonfire/checkpoint/load.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/piece_reader.h"
#include "bonfire/comm/hear.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_named = 10;

// A list that can be read, however long it is.
std::string listed(const std::vector<std::string>& names) {
  const auto count = std::min(names.size(), most_named);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(count), ", "));
  if (count < names.size()) text += fmt::format(" and {} others", names.size() - count);
  return text;
}

template <class Tensor>  // a Slice or a ManifestTensor
bool wants(const LoadSelection& selection, const Tensor& tensor) {
  return !selection.wanted || selection.wanted(tensor.name, tensor.kind);
}

void load_slice(PieceReader& reader, const ManifestTensor& tensor, const Slice& slice) {
  reader.read(tensor, {.box = slice.box, .first = slice.begin, .count = slice.length},
              [&](std::int64_t at, const at::Tensor& values) { slice.write(at, values); });
}

// A tensor of each rank, that another number of ranks has saved.
bool is_of_more_or_fewer_ranks(const ManifestTensor& tensor, const Slice& slice) {
  return slice.of_each_rank && !tensor.shape.empty() && tensor.shape.size() == slice.shape.size() && tensor.shape[0] > 0 &&
         std::equal(tensor.shape.begin() + 1, tensor.shape.end(), slice.shape.begin() + 1);
}

// What the ranks had on average, which leaves their sum over all data what it was.
void load_mean(PieceReader& reader, const ManifestTensor& tensor, const Slice& slice) {
  auto mean = at::zeros({slice.length}, at::kDouble);
  Slice of_one = slice;
  of_one.shape = tensor.shape;
  of_one.set = [&](std::int64_t at, const at::Tensor& values) {
    mean.narrow(0, at, values.numel()).add_(values.to(at::kDouble), 1.0 / static_cast<double>(tensor.shape[0]));
  };
  for (std::int64_t rank = 0; rank < tensor.shape[0]; ++rank) {
    of_one.box.begin[0] = rank;
    of_one.box.end[0] = rank + 1;
    load_slice(reader, tensor, of_one);
  }
  slice.write(0, mean);
}

}  // namespace

void require_same_tensors(const Manifest& manifest, const std::vector<Slice>& slices, const LoadSelection& selection,
                          const Group& group) {
  std::vector<std::string> missing, different, unexpected;
  auto asked = at::zeros({static_cast<std::int64_t>(manifest.tensors.size())}, at::kLong);
  auto* const marks = asked.mutable_data_ptr<std::int64_t>();
  for (const auto& slice : slices) {
    if (!wants(selection, slice) || is_hint(slice.kind)) continue;
    const auto* tensor = manifest.find(slice.name, slice.kind);
    if (tensor == nullptr) {
      missing.push_back(described(slice.name, slice.kind));
      continue;
    }
    marks[tensor - manifest.tensors.data()] = 1;
    if (tensor->shape != slice.shape)
      different.push_back(fmt::format("{} is [{}] here and [{}] in the checkpoint", described(slice.name, slice.kind),
                                      fmt::join(slice.shape, ", "), fmt::join(tensor->shape, ", ")));
  }
  // What any of the ranks asks for.
  asked = asked.to(group.device());
  group.all_reduce(asked, Reduce::max).wait();
  asked = asked.cpu();
  for (std::size_t at = 0; selection.exact && at < manifest.tensors.size(); ++at) {
    const auto& tensor = manifest.tensors[at];
    if (asked.const_data_ptr<std::int64_t>()[at] == 0 && !is_hint(tensor.kind) && wants(selection, tensor))
      unexpected.push_back(described(tensor.name, tensor.kind));
  }
  do_or_fail_together(group, [&] {
    std::string words;
    if (!different.empty()) words += "; of other shapes: " + listed(different);
    if (!missing.empty()) words += "; not in the checkpoint: " + listed(missing);
    // A rank that misses nothing lets the others speak first.
    if (!words.empty() && !unexpected.empty()) words += "; in the checkpoint only: " + listed(unexpected);
    if (!words.empty()) fail_config("the checkpoint is not of this model and optimizer{}", words);
  });
  if (!unexpected.empty())
    fail_config("the checkpoint is not of this model and optimizer; in the checkpoint only: {}", listed(unexpected));
}

void load_slices(const fs::path& checkpoint, const Manifest& manifest, const std::vector<Slice>& slices,
                 const LoadSelection& selection) {
  PieceReader reader(checkpoint);
  for (const auto& slice : slices) {
    if (!wants(selection, slice)) continue;
    const auto* tensor = manifest.find(slice.name, slice.kind);
    const bool fits = tensor != nullptr && tensor->shape == slice.shape;
    if (fits)
      load_slice(reader, *tensor, slice);
    else if (tensor != nullptr && is_of_more_or_fewer_ranks(*tensor, slice))
      load_mean(reader, *tensor, slice);
    else
      require(is_hint(slice.kind), "{} is not in the checkpoint", described(slice.name, slice.kind));
  }
}

std::vector<std::string> verify_checkpoint(const fs::path& checkpoint,
                                           const std::function<void(std::uint64_t bytes)>& progress) {
  std::vector<std::string> problems;
  const auto manifest = [&]() -> std::optional<Manifest> {
    try {
      return read_manifest(checkpoint);
    } catch (const Error& error) {
      problems.push_back(error.what());
      return std::nullopt;
    }
  }();
  if (!manifest) return problems;
  const auto of_files = problems_of_files(checkpoint, *manifest);
  for (const auto& [file, problem] : of_files) problems.push_back(problem);
  PieceReader reader(checkpoint);
  for (const auto& tensor : manifest->tensors)
    for (const auto& piece : tensor.pieces) {
      if (of_files.contains(piece.file)) continue;
      for (std::size_t number = 0; number < piece.checksums.size(); ++number) try {
          const auto& chunk = reader.chunk(tensor, piece, static_cast<std::int64_t>(number));
          if (progress) progress(chunk.nbytes());
        } catch (const Error& error) {
          problems.push_back(error.what());
        }
    }
  return problems;
}

}  // namespace bonfire
