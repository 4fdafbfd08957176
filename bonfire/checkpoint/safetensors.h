#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/input_file.h"
#include "bonfire/base/output_file.h"

// The files in which tensors are kept: a length, a header in JSON, and the bytes of one tensor after another. No code is in
// them, and anybody can read them.
namespace bonfire {

// By the names that the format has for them: "BF16".
enum class StoredType { boolean, u8, i8, f8_e5m2, f8_e4m3, i16, u16, f16, bf16, i32, u32, f32, f64, i64, u64 };
BONFIRE_API std::string_view name_of(StoredType type);
BONFIRE_API std::int64_t bytes_of(StoredType type);
BONFIRE_API std::optional<StoredType> stored_type_of(std::string_view name);  // nothing: there is none of this name

struct StoredTensor {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<std::int64_t> shape{};  // empty: a scalar
  std::uint64_t begin = 0;            // in the data behind the header
  std::uint64_t bytes = 0;
};

using StoredMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors{};  // as they lie in the file
  StoredMetadata metadata{};
};

// Throws ConfigError that names what is wrong, before anything is allocated by a number that stands in the header. `name`
// stands for the file in messages; `data_bytes` follow the header there.
BONFIRE_API SafetensorsHeader parse_safetensors(std::string_view header, std::uint64_t data_bytes, const std::string& name);

// Any thread may read.
class BONFIRE_API SafetensorsFile {
 public:
  // Reads and checks the header, and nothing behind it. Throws ConfigError.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return header_.tensors; }
  const StoredMetadata& metadata() const { return header_.metadata; }
  const StoredTensor* find(std::string_view name) const;  // null: it is not there
  std::uint64_t data_offset() const { return data_; }     // of the first tensor in the file

  // The tensor's bytes from `offset` on. Throws Error where they cannot be read. REQUIRES: they are the tensor's.
  void read(const StoredTensor& tensor, std::uint64_t offset, std::span<std::byte> bytes) const;

 private:
  InputFile file_;
  std::uint64_t data_ = 0;  // where the data begin
  SafetensorsHeader header_;
  std::map<std::string_view, std::size_t> places_;
};

// Writes a file whose tensors are known before the first of their bytes. It has its name only after commit().
class BONFIRE_API SafetensorsWriter {
 public:
  // `begin` and `bytes` of the tensors are found from their shapes. Throws WriteError.
  SafetensorsWriter(std::filesystem::path path, std::vector<StoredTensor> tensors, const StoredMetadata& metadata = {});

  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  std::uint64_t data_offset() const { return data_; }  // of the first tensor in the file
  // The next bytes of the tensors, in pieces of any size. Throws WriteError.
  void append(std::span<const std::byte> bytes);
  // REQUIRES: all bytes of all tensors have come.
  void commit(Survives survives = Survives::power_loss);

 private:
  OutputFile file_;
  std::vector<StoredTensor> tensors_;
  std::uint64_t data_ = 0, data_bytes_ = 0;
};

}  // namespace bonfire
