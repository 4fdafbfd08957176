#include "bonfire/checkpoint/base_weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/checkpoint/manifest.h"
#include "bonfire/checkpoint/piece_reader.h"
#include "bonfire/checkpoint/scalar_types.h"
#include "bonfire/comm/hear.h"
#include "bonfire/comm/progress.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// Elements that are read at a time.
constexpr std::int64_t at_once = std::int64_t{1} << 20;

// A line for each tensor: what it is, and a checksum for each run of its elements in their order.
void describe(std::string& text, PieceReader& reader, const ManifestTensor& tensor,
              const std::function<void(std::uint64_t)>& progress) {
  text += fmt::format("{} {} {} [{}]", tensor.name, tensor.kind, name_of(tensor.type), fmt::join(tensor.shape, ","));
  const std::int64_t elements = elements_of(whole_box(tensor.shape));
  const auto each = static_cast<std::size_t>(bytes_of(tensor.type));
  std::vector<std::byte> bytes;
  for (std::int64_t first = 0; first < elements; first += at_once) {
    const std::int64_t count = std::min(at_once, elements - first);
    bytes.resize(static_cast<std::size_t>(count) * each);
    reader.read(tensor, {.box = whole_box(tensor.shape), .first = first, .count = count},
                [&](std::int64_t at, const at::Tensor& values) {
                  std::memcpy(bytes.data() + static_cast<std::size_t>(at) * each, values.const_data_ptr(), values.nbytes());
                });
    text += " " + checksum_of(bytes);
    if (progress) progress(bytes.size());
  }
  text += "\n";
}

}  // namespace

std::string checksum_of_weights(const fs::path& checkpoint, const std::function<void(std::uint64_t)>& progress) {
  const auto manifest = read_manifest(checkpoint);
  std::vector<const ManifestTensor*> weights;
  for (const auto& tensor : manifest.tensors)
    if (tensor.kind == "value" || tensor.kind == "buffer") weights.push_back(&tensor);
  std::sort(weights.begin(), weights.end(),
            [](const auto* a, const auto* b) { return std::tie(a->name, a->kind) < std::tie(b->name, b->kind); });
  PieceReader reader(checkpoint);
  std::string text;
  for (const auto* tensor : weights) describe(text, reader, *tensor, progress);
  return checksum_of(std::as_bytes(std::span(text)));
}

BaseOfCheckpoint base_of(const fs::path& checkpoint) {
  const auto manifest = read_manifest(checkpoint);
  const auto base = manifest.states.find(base_state);
  if (base == manifest.states.end()) return {};
  return {state_value<std::string>(base->second, "folder"), state_value<std::string>(base->second, "checksum")};
}

std::string other_base(const BaseOfCheckpoint& base, const std::string& folder, const std::string& checksum) {
  if (base.checksum == checksum) return {};
  return fmt::format("the checkpoint is over other weights: those of '{}' have the checksum {}, it was saved over {} ('{}')",
                     folder, checksum, base.checksum, base.folder);
}

BaseWeights::BaseWeights(const World& world, const fs::path& checkpoint) : folder_(fs::absolute(checkpoint).string()) {
  const ProgressBoard::Busy busy(world.progress().get(), "checkpoint");
  do_or_fail_together(world.group(), [&] {
    if (world.rank() == 0) checksum_ = checksum_of_weights(checkpoint);
  });
  checksum_ = hear(world.group(), checksum_, 0, world.device());
}

State BaseWeights::save() const { return {{"folder", folder_}, {"checksum", checksum_}}; }

void BaseWeights::load(const State& state) {
  const BaseOfCheckpoint base{state_value<std::string>(state, "folder"), state_value<std::string>(state, "checksum")};
  if (const auto words = other_base(base, folder_, checksum_); !words.empty()) fail_config("{}", words);
}

}  // namespace bonfire
