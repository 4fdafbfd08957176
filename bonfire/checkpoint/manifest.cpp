#include "bonfire/checkpoint/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/base/look.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;
using Written = nlohmann::ordered_json;

constexpr std::string_view format_name = "bonfire checkpoint";

// Names may hold anything; messages are one line.
std::string escaped(std::string_view text) { return nlohmann::json(text).dump(); }

std::string described(const ManifestTensor& tensor) {
  return tensor.name.empty() ? escaped(tensor.kind) : fmt::format("{} of {}", escaped(tensor.kind), escaped(tensor.name));
}

// --- What is wrong with the pieces of a tensor; nothing where they are all of it, each element once.

std::optional<std::int64_t> elements_of_shape(const Shape& shape) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max() / 8;  // in bytes, whatever the type
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && elements > most / size)) return std::nullopt;
    elements *= size;
  }
  return elements;
}

std::optional<std::string> wrong_with(const Piece& piece, const Shape& shape) {
  const auto& [box, first, count] = piece;
  if (box.begin.size() != shape.size() || box.end.size() != shape.size())
    return fmt::format("a piece with {} and {} dimensions of one with {}", box.begin.size(), box.end.size(), shape.size());
  for (std::size_t dim = 0; dim < shape.size(); ++dim)
    if (box.begin[dim] < 0 || box.end[dim] < box.begin[dim] || box.end[dim] > shape[dim])
      return fmt::format("a piece with [{}, {}) of dimension {}, which has {}", box.begin[dim], box.end[dim], dim,
                         shape[dim]);
  if (first < 0 || count < 0 || count > elements_of(box) || first > elements_of(box) - count)
    return fmt::format("{} elements from {} on of a piece with {}", count, first, elements_of(box));
  return std::nullopt;
}

bool disjoint(const Box& a, const Box& b) {
  for (std::size_t dim = 0; dim < a.begin.size(); ++dim)
    if (a.end[dim] <= b.begin[dim] || b.end[dim] <= a.begin[dim]) return true;
  return false;
}

std::optional<std::string> wrong_with(const std::vector<StoredPiece>& pieces, std::int64_t elements) {
  std::vector<const Piece*> sorted;
  for (const auto& piece : pieces)
    if (piece.piece.count > 0) sorted.push_back(&piece.piece);
  const auto order = [](const Piece* piece) { return std::tie(piece->box.begin, piece->box.end, piece->first); };
  std::sort(sorted.begin(), sorted.end(), [&](const Piece* a, const Piece* b) { return order(a) < order(b); });
  std::int64_t found = 0;
  std::vector<const Box*> boxes;
  for (std::size_t at = 0; at < sorted.size(); ++at) {
    const auto& piece = *sorted[at];
    found += piece.count;
    if (!boxes.empty() && *boxes.back() == piece.box) {
      if (piece.first < sorted[at - 1]->first + sorted[at - 1]->count) return "some of its elements are there twice";
      continue;
    }
    for (const Box* box : boxes)
      if (!disjoint(*box, piece.box))
        return "two boxes of it overlap; allowed: boxes that are alike, or have nothing in common";
    boxes.push_back(&piece.box);
  }
  if (found < elements) return fmt::format("{} of its {} elements are missing", elements - found, elements);
  return std::nullopt;
}

// --- Writing.

Written written(const StoredPiece& stored, const Shape& shape) {
  Written json = {{"file", stored.file}, {"tensor", stored.tensor}, {"offset", stored.offset}};
  if (stored.piece.box != whole_box(shape)) {
    json["box_begin"] = stored.piece.box.begin;
    json["box_end"] = stored.piece.box.end;
  }
  json["first"] = stored.piece.first;
  json["count"] = stored.piece.count;
  json["checksums"] = stored.checksums;
  return json;
}

Written written(const std::vector<ManifestTensor>& tensors) {
  Written all = Written::array();
  for (const auto& tensor : tensors) {
    Written pieces = Written::array();
    for (const auto& piece : tensor.pieces) pieces.push_back(written(piece, tensor.shape));
    all.push_back({{"name", tensor.name},
                   {"kind", tensor.kind},
                   {"dtype", name_of(tensor.type)},
                   {"shape", tensor.shape},
                   {"pieces", std::move(pieces)}});
  }
  return all;
}

Written written(const std::string& name, const StateValue& value) {
  return std::visit(
      [&](const auto& held) -> Written {
        using Held = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<Held, double>) {
          require(std::isfinite(held), "the state '{}' is {}; only finite numbers can be saved", name, held);
          return {{"real", held}};
        } else {
          return {{std::is_same_v<Held, std::string> ? "text" : "integer", held}};
        }
      },
      value);
}

// --- Reading.

// The members of an object with these keys, all of which it must have, and no others.
class Members {
 public:
  Members(const Json& json, std::vector<std::string_view> keys, const std::vector<std::string_view>& optional = {})
      : json_(json) {
    for (const auto& [key, value] : json.members()) {
      const auto is_key = [&key = key](std::string_view known) { return known == key; };
      if (std::none_of(keys.begin(), keys.end(), is_key) && std::none_of(optional.begin(), optional.end(), is_key))
        value.refuse(fmt::format("{} is not known; allowed: {}{}{}", escaped(key), fmt::join(keys, ", "),
                                 optional.empty() ? "" : ", ", fmt::join(optional, ", ")));
      members_.emplace(key, value);
    }
    for (const auto key : keys)
      if (!members_.contains(key)) json.refuse(fmt::format("\"{}\" is missing", key));
  }
  const Json& at(std::string_view key) const { return members_.find(key)->second; }
  bool has(std::string_view key) const { return members_.contains(key); }

 private:
  const Json& json_;
  std::map<std::string, Json, std::less<>> members_;
};

std::int64_t natural_of(const Json& json) {
  if (json.integer() < 0) json.refuse(fmt::format("is {}; allowed: 0 and more", json.integer()));
  return json.integer();
}

Shape numbers_of(const Json& json) {
  Shape numbers;
  for (const Json& item : json.items()) numbers.push_back(natural_of(item));
  return numbers;
}

// A plain name: what it names is in the folder.
std::string file_of(const Json& json) {
  const std::string& name = json.string();
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos)
    json.refuse(fmt::format("{} is not the name of a file in the checkpoint's own folder", escaped(name)));
  return name;
}

StoredPiece piece_of(const Json& json, const ManifestTensor& tensor) {
  const Members members(json, {"file", "tensor", "offset", "first", "count", "checksums"}, {"box_begin", "box_end"});
  StoredPiece stored;
  stored.file = file_of(members.at("file"));
  stored.tensor = members.at("tensor").string();
  stored.offset = static_cast<std::uint64_t>(natural_of(members.at("offset")));
  stored.piece.box = whole_box(tensor.shape);
  if (members.has("box_begin") != members.has("box_end")) json.refuse("\"box_begin\" and \"box_end\" belong together");
  if (members.has("box_begin")) stored.piece.box = {numbers_of(members.at("box_begin")), numbers_of(members.at("box_end"))};
  stored.piece.first = natural_of(members.at("first"));
  stored.piece.count = natural_of(members.at("count"));
  if (const auto wrong = wrong_with(stored.piece, tensor.shape))
    json.refuse(fmt::format("{}: {}", described(tensor), *wrong));
  for (const Json& item : members.at("checksums").items()) stored.checksums.push_back(item.string());
  const auto bytes = static_cast<std::uint64_t>(stored.piece.count * bytes_of(tensor.type));
  if (const auto needed = (bytes + checksum_bytes - 1) / checksum_bytes; stored.checksums.size() != needed)
    members.at("checksums").refuse(fmt::format("{} for {} bytes; allowed: {}", stored.checksums.size(), bytes, needed));
  if (stored.offset > std::numeric_limits<std::uint64_t>::max() / 4 - bytes)
    members.at("offset").refuse(fmt::format("{} is beyond the end of any file", stored.offset));
  return stored;
}

ManifestTensor tensor_of(const Json& json) {
  const Members members(json, {"name", "kind", "dtype", "shape", "pieces"});
  ManifestTensor tensor{.name = members.at("name").string(), .kind = members.at("kind").string()};
  const auto type = stored_type_of(members.at("dtype").string());
  if (!type) members.at("dtype").refuse(fmt::format("{} is not known", escaped(members.at("dtype").string())));
  tensor.type = *type;
  tensor.shape = numbers_of(members.at("shape"));
  if (!elements_of_shape(tensor.shape))
    members.at("shape").refuse(fmt::format("[{}] is larger than any file", fmt::join(tensor.shape, ", ")));
  for (const Json& item : members.at("pieces").items()) tensor.pieces.push_back(piece_of(item, tensor));
  return tensor;
}

std::vector<ManifestTensor> tensors_of(const Json& json) {
  std::vector<ManifestTensor> tensors;
  for (const Json& item : json.items()) tensors.push_back(tensor_of(item));
  return tensors;
}

StateValue value_of(const Json& json) {
  const auto members = json.members();
  if (members.size() == 1) {
    const auto& [type, value] = members.front();
    if (type == "integer") return value.integer();
    if (type == "real") return value.number();
    if (type == "text") return value.string();
  }
  json.refuse("must be one of {\"integer\": ...}, {\"real\": ...}, {\"text\": ...}");
}

// What is wrong with a file that we have written ourselves is a fault of the disk, or of whoever changed it.
template <class Read>
auto as_broken(const Read& read) {
  try {
    return read();
  } catch (const ConfigError& error) {
    throw BrokenCheckpoint(error.what());
  }
}

// Whatever is written by a later version may mean something else: it is refused by its number before anything else is read.
std::int64_t version_of(const Json& json) {
  const auto version = as_broken([&] {
    if (json.at("format").string() != format_name) json.at("format").refuse(fmt::format("allowed: \"{}\"", format_name));
    return json.at("version").integer();
  });
  if (version < 1 || version > manifest_version)
    json.at("version").refuse(fmt::format("format version {}; this program reads versions 1 to {}{}", version,
                                          manifest_version,
                                          version > manifest_version ? ": a newer Bonfire has written it" : ""));
  return version;
}

// The last key since version 2: its value is the checksum of all bytes before that.
constexpr std::string_view checksum_key = "checksum", behind_checksum = "\"\n}\n";
constexpr std::size_t checksum_letters = 16;

std::string with_checksum(std::string text) {
  text.resize(text.size() - behind_checksum.size());
  return text + checksum_of(std::as_bytes(std::span(text))) + std::string(behind_checksum);
}

void check_text(std::string_view text, const Json& checksum) {
  const std::size_t behind = checksum_letters + behind_checksum.size();
  const auto before = text.substr(0, text.size() - std::min(behind, text.size()));
  if (!text.ends_with(checksum.string() + std::string(behind_checksum)) ||
      checksum.string() != checksum_of(std::as_bytes(std::span(before))))
    checksum.refuse("is not that of the text before it, so the text is not the one that was saved");
}

using Key = std::pair<std::string, std::string>;
Key key_of(const ManifestTensor& tensor) { return {tensor.name, tensor.kind}; }

Manifest manifest_of(const Json& json, std::string_view text, std::int64_t version, const std::string& name) {
  std::vector<std::string_view> keys{"format", "version", "step", "checksums", "configuration", "state", "tensors"};
  if (version >= 2) keys.push_back(checksum_key);
  const Members members(json, keys);
  if (version >= 2) check_text(text, members.at(checksum_key));
  const Members checksums(members.at("checksums"), {"algorithm", "bytes"});
  if (checksums.at("algorithm").string() != "XXH3-64" ||
      checksums.at("bytes").integer() != static_cast<std::int64_t>(checksum_bytes))
    members.at("checksums").refuse(fmt::format("allowed: XXH3-64 of {} bytes each", checksum_bytes));
  Manifest manifest{.step = natural_of(members.at("step")), .configuration = members.at("configuration").string()};
  for (const auto& [of, state] : members.at("state").members())
    for (const auto& [value_name, value] : state.members()) manifest.states[of][value_name] = value_of(value);
  manifest.tensors = tensors_of(members.at("tensors"));
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const auto& a, const auto& b) { return key_of(a) < key_of(b); });
  for (std::size_t at = 0; at < manifest.tensors.size(); ++at) {
    const auto& tensor = manifest.tensors[at];
    if (at > 0 && key_of(manifest.tensors[at - 1]) == key_of(tensor))
      fail_config("'{}': {} is there twice", name, described(tensor));
    if (const auto wrong = wrong_with(tensor.pieces, *elements_of_shape(tensor.shape)))
      fail_config("'{}': {}: {}", name, described(tensor), *wrong);
  }
  return manifest;
}

}  // namespace

const ManifestTensor* Manifest::find(std::string_view name, std::string_view kind) const {
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), std::pair(name, kind), [](const auto& tensor, const auto& key) {
        return std::pair<std::string_view, std::string_view>(tensor.name, tensor.kind) < key;
      });
  return at != tensors.end() && at->name == name && at->kind == kind ? &*at : nullptr;
}

std::string to_json(const Manifest& manifest, std::uint64_t most) {
  Written states = Written::object();
  for (const auto& [of, state] : manifest.states) {
    Written values = Written::object();
    for (const auto& [name, value] : state) values[name] = written(of + "." + name, value);
    states[of] = std::move(values);
  }
  const Written json = {{"format", format_name},
                        {"version", manifest_version},
                        {"step", manifest.step},
                        {"checksums", {{"algorithm", "XXH3-64"}, {"bytes", checksum_bytes}}},
                        {"configuration", manifest.configuration},
                        {"state", std::move(states)},
                        {"tensors", written(manifest.tensors)},
                        {checksum_key, ""}};
  auto text = with_checksum(json.dump(1) + "\n");
  // What nobody could read is not written.
  require(text.size() <= most, "the manifest of {} tensors would have {} bytes; allowed: at most {}",
          manifest.tensors.size(), text.size(), most);
  return text;
}

Manifest parse_manifest(std::string_view text, const std::string& name) {
  const Json json = as_broken([&] { return parse_json(text, name); });
  const auto version = version_of(json);
  return as_broken([&] { return manifest_of(json, text, version, name); });
}

Manifest read_manifest(const fs::path& folder) {
  if (!is_folder(folder)) fail_config("'{}': is no folder of a checkpoint", folder.string());
  const fs::path file = folder / manifest_name;
  const auto text = as_broken([&] { return InputFile(file.string()).text(most_json_bytes); });
  return parse_manifest(text, file.string());
}

std::string pieces_to_json(const std::vector<ManifestTensor>& tensors) { return written(tensors).dump() + "\n"; }

std::vector<ManifestTensor> parse_pieces(std::string_view text, const std::string& name) {
  return tensors_of(parse_json(text, name));
}

std::vector<ManifestTensor> merge_pieces(const std::vector<std::vector<ManifestTensor>>& of_ranks) {
  std::map<Key, ManifestTensor> merged;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank)
    for (const auto& tensor : of_ranks[rank]) {
      const auto [at, first] = merged.emplace(key_of(tensor), tensor);
      if (first) continue;
      auto& known = at->second;
      require(known.type == tensor.type && known.shape == tensor.shape,
              "rank {} saves {} as {} of shape [{}], another rank as {} of shape [{}]", rank, described(tensor),
              name_of(tensor.type), fmt::join(tensor.shape, ", "), name_of(known.type), fmt::join(known.shape, ", "));
      known.pieces.insert(known.pieces.end(), tensor.pieces.begin(), tensor.pieces.end());
    }
  std::vector<ManifestTensor> tensors;
  for (auto& [key, tensor] : merged) {
    if (const auto wrong = wrong_with(tensor.pieces, *elements_of_shape(tensor.shape)))
      fail("{} cannot be saved: {}", described(tensor), *wrong);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::string checksum_of(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace bonfire
