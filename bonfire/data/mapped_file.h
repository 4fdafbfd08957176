#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

namespace bonfire {

// A whole file in memory, read-only; its pages come from the disk as they are touched. Throws ConfigError where the file
// is missing, is not a plain file, cannot be read or is empty.
class MappedFile {
 public:
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  const std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }

  // The little-endian value at a byte, aligned or not.
  template <class T>
  T at(std::uint64_t offset) const {
    if (sizeof(T) > size_ || offset > size_ - sizeof(T))
      fail_config("'{}': cut short: {} bytes at byte {} of a file of {} bytes", path_, sizeof(T), offset, size_);
    T value;
    std::memcpy(&value, data_ + offset, sizeof(T));
    return value;
  }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace bonfire
