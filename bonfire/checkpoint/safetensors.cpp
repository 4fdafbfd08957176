#include "bonfire/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <utility>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"

namespace bonfire {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

struct TypeEntry {
  StoredType type;
  std::string_view name;
  std::int64_t bytes;
};
constexpr std::array<TypeEntry, 15> types{{{StoredType::boolean, "BOOL", 1},
                                           {StoredType::u8, "U8", 1},
                                           {StoredType::i8, "I8", 1},
                                           {StoredType::f8_e5m2, "F8_E5M2", 1},
                                           {StoredType::f8_e4m3, "F8_E4M3", 1},
                                           {StoredType::i16, "I16", 2},
                                           {StoredType::u16, "U16", 2},
                                           {StoredType::f16, "F16", 2},
                                           {StoredType::bf16, "BF16", 2},
                                           {StoredType::i32, "I32", 4},
                                           {StoredType::u32, "U32", 4},
                                           {StoredType::f32, "F32", 4},
                                           {StoredType::f64, "F64", 8},
                                           {StoredType::i64, "I64", 8},
                                           {StoredType::u64, "U64", 8}}};

static_assert([] {
  for (std::size_t i = 0; i < types.size(); ++i)
    if (types[i].type != static_cast<StoredType>(i)) return false;
  return true;
}());

constexpr std::uint64_t most_header_bytes = 100'000'000;  // the format's own limit
constexpr std::string_view metadata_key = "__metadata__";

const TypeEntry& entry_of(StoredType type) { return types.at(static_cast<std::size_t>(type)); }

// None where that is more than a file can hold.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, StoredType type) {
  // A dimension of 0 makes it 0, whatever the others are.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t bytes = static_cast<std::uint64_t>(entry_of(type).bytes);
  for (const std::int64_t size : shape) {
    if (bytes > most / static_cast<std::uint64_t>(size)) return std::nullopt;
    bytes *= static_cast<std::uint64_t>(size);
  }
  return bytes;
}

StoredType type_of(const Json& json) {
  if (const auto type = stored_type_of(json.string())) return *type;
  std::vector<std::string_view> names;
  for (const auto& entry : types) names.push_back(entry.name);
  json.refuse(fmt::format("dtype \"{}\" is not known; allowed: {}", json.string(), fmt::join(names, " | ")));
}

std::uint64_t count_of(const Json& json) {
  if (json.integer() < 0) json.refuse(fmt::format("is {}; allowed: 0 and more", json.integer()));
  return static_cast<std::uint64_t>(json.integer());
}

StoredTensor tensor_of(const std::string& name, const Json& json) {
  StoredTensor tensor{.name = name};
  for (const auto& [key, value] : json.members())
    if (key != "dtype" && key != "shape" && key != "data_offsets")
      value.refuse(fmt::format("\"{}\" is not known; allowed: dtype, shape, data_offsets", key));
  tensor.type = type_of(json.at("dtype"));
  for (const Json& size : json.at("shape").items()) tensor.shape.push_back(static_cast<std::int64_t>(count_of(size)));
  const Json offsets = json.at("data_offsets");
  const auto both = offsets.items();
  if (both.size() != 2) offsets.refuse(fmt::format("has {} numbers; allowed: 2, begin and end", both.size()));
  tensor.begin = count_of(both[0]);
  const std::uint64_t end = count_of(both[1]);
  if (end < tensor.begin) offsets.refuse(fmt::format("ends at {} before it begins at {}", end, tensor.begin));
  tensor.bytes = end - tensor.begin;
  const auto needed = bytes_of(tensor.shape, tensor.type);
  if (!needed) json.refuse(fmt::format("a tensor of shape [{}] is larger than any file", fmt::join(tensor.shape, ", ")));
  if (*needed != tensor.bytes)
    offsets.refuse(fmt::format("are {} bytes; a tensor of shape [{}] in {} has {}", tensor.bytes,
                               fmt::join(tensor.shape, ", "), name_of(tensor.type), *needed));
  return tensor;
}

}  // namespace

std::string_view name_of(StoredType type) { return entry_of(type).name; }
std::int64_t bytes_of(StoredType type) { return entry_of(type).bytes; }
std::optional<StoredType> stored_type_of(std::string_view name) {
  for (const auto& entry : types)
    if (entry.name == name) return entry.type;
  return std::nullopt;
}

SafetensorsHeader parse_safetensors(std::string_view header, std::uint64_t data_bytes, const std::string& name) {
  if (!header.starts_with('{')) fail_config("'{}': its header does not begin with '{{': this is no safetensors file", name);
  SafetensorsHeader all;
  const Json json = parse_json(header, name);
  for (const auto& [key, value] : json.members()) {
    if (key == metadata_key)
      for (const auto& [of, text] : value.members()) all.metadata.emplace(of, text.string());
    else
      all.tensors.push_back(tensor_of(key, value));
  }
  std::stable_sort(all.tensors.begin(), all.tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::uint64_t end = 0;
  for (const auto& tensor : all.tensors) {
    if (tensor.begin != end)
      fail_config("'{}': tensor \"{}\" begins at byte {} of the data; allowed: {}, where the one before it ends", name,
                  tensor.name, tensor.begin, end);
    end += tensor.bytes;
  }
  if (end != data_bytes) fail_config("'{}': its tensors have {} bytes of data, the file has {}", name, end, data_bytes);
  return all;
}

SafetensorsFile::SafetensorsFile(std::string path) : file_(std::move(path)) {
  const auto length = file_.at<std::uint64_t>(0);
  if (length > most_header_bytes)
    fail_config("'{}': a header of {} bytes; allowed: at most {}", this->path(), length, most_header_bytes);
  data_ = sizeof(length) + length;
  if (data_ > file_.size())
    fail_config("'{}': cut short: a header of {} bytes in a file of {} bytes", this->path(), length, file_.size());
  std::string header(length, '\0');
  file_.read(sizeof(length), std::as_writable_bytes(std::span(header)));
  header_ = parse_safetensors(header, file_.size() - data_, this->path());
  for (std::size_t i = 0; i < header_.tensors.size(); ++i) places_.emplace(header_.tensors[i].name, i);
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto at = places_.find(name);
  return at == places_.end() ? nullptr : &header_.tensors[at->second];
}

void SafetensorsFile::read(const StoredTensor& tensor, std::uint64_t offset, std::span<std::byte> bytes) const {
  require(offset <= tensor.bytes && bytes.size() <= tensor.bytes - offset,
          "'{}': bytes {} to {} of tensor \"{}\", which has {}", path(), offset, offset + bytes.size(), tensor.name,
          tensor.bytes);
  file_.read(data_ + tensor.begin + offset, bytes);
}

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<StoredTensor> tensors,
                                     const StoredMetadata& metadata)
    : file_(std::move(path)), tensors_(std::move(tensors)) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(metadata_key)] = metadata;
  for (auto& tensor : tensors_) {
    require(tensor.name != metadata_key && !header.contains(tensor.name), "'{}': two tensors called \"{}\"",
            file_.path().string(), tensor.name);
    const auto bytes = bytes_of(tensor.shape, tensor.type);
    require(bytes.has_value(), "'{}': tensor \"{}\" of shape [{}] is larger than any file", file_.path().string(),
            tensor.name, fmt::join(tensor.shape, ", "));
    tensor.begin = data_bytes_;
    tensor.bytes = *bytes;
    data_bytes_ += *bytes;
    header[tensor.name] = {
        {"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, data_bytes_}}};
  }
  std::string text = header.dump();
  // Data that begin at a multiple of eight bytes can be mapped by readers that do so.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  require(text.size() <= most_header_bytes, "'{}': {} tensors need a header of {} bytes; allowed: at most {}",
          file_.path().string(), tensors_.size(), text.size(), most_header_bytes);
  const std::uint64_t length = text.size();
  file_.append(std::as_bytes(std::span(&length, 1)));
  file_.append(text);
  data_ = sizeof(length) + length;
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  require(bytes.size() <= data_ + data_bytes_ - file_.size(), "'{}': more bytes than its tensors have ({})",
          file_.path().string(), data_bytes_);
  file_.append(bytes);
}

void SafetensorsWriter::commit(Survives survives) {
  require(file_.size() == data_ + data_bytes_, "'{}': {} of {} bytes of its tensors have come", file_.path().string(),
          file_.size() - data_, data_bytes_);
  file_.commit(survives);
}

}  // namespace bonfire
