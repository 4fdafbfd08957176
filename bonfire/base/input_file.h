#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

namespace bonfire {

// A plain file, read where it is asked for. Any thread may read. It is not mapped into memory, because a mapping turns a
// file that shrinks, or a disk that fails, into a signal; here they are errors that name the file.
class BONFIRE_API InputFile {
 public:
  // Throws ConfigError where the file is missing, is not a plain file or cannot be read.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }               // when it was opened
  std::int64_t modified_ns() const { return modified_ns_; }  // when it was opened, since 1970

  // Throws Error where the file has become shorter than that, or cannot be read.
  void read(std::uint64_t offset, std::span<std::byte> bytes) const;

  // All of it. Throws ConfigError where it is larger than `most` bytes: what is read whole is small.
  std::string text(std::uint64_t most) const;

  // The little-endian value at a byte. Throws ConfigError where the file ends before it.
  template <class T>
  T at(std::uint64_t offset) const {
    if (sizeof(T) > size_ || offset > size_ - sizeof(T))
      fail_config("'{}': cut short: {} bytes at byte {} of a file of {} bytes", path_, sizeof(T), offset, size_);
    T value;
    read(offset, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }

 private:
  std::string path_;
  int file_ = -1;
  std::uint64_t size_ = 0;
  std::int64_t modified_ns_ = 0;
};

}  // namespace bonfire
