#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"
#include "bonfire/train/run_file.h"

namespace bonfire {

// CRC-32C (Castagnoli).
BONFIRE_API std::uint32_t crc32c(std::string_view data);

// Writes curves for TensorBoard: a file of framed records, each a protocol-buffers Event.
class BONFIRE_API EventWriter {
 public:
  struct Scalar {
    std::string_view tag;
    double value;  // stored as fp32, which is what the format has
  };

  // A new file in the folder, which is made where it is missing. Throws WriteError, as scalars() does.
  explicit EventWriter(const std::filesystem::path& folder);

  void scalars(std::int64_t step, std::initializer_list<Scalar> values);

  const std::filesystem::path& path() const { return path_; }

 private:
  void write_record(std::string_view event);

  std::filesystem::path path_;
  RunFile file_;
};

}  // namespace bonfire
