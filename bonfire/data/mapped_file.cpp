#include "bonfire/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace bonfire {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail_config("'{}': {}", path_, std::strerror(errno));
  struct stat about {};
  const bool known = ::fstat(file, &about) == 0;
  void* memory = MAP_FAILED;
  if (known && S_ISREG(about.st_mode) && about.st_size > 0)
    memory = ::mmap(nullptr, static_cast<std::size_t>(about.st_size), PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  if (known && !S_ISREG(about.st_mode)) fail_config("'{}': is not a file", path_);
  if (known && about.st_size == 0) fail_config("'{}': is empty", path_);
  if (memory == MAP_FAILED) fail_config("'{}': {}", path_, std::strerror(error));
  data_ = static_cast<const std::byte*>(memory);
  size_ = static_cast<std::uint64_t>(about.st_size);
}

MappedFile::~MappedFile() { ::munmap(const_cast<std::byte*>(data_), size_); }

}  // namespace bonfire
