#include "bonfire/base/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "bonfire/base/open_files.h"

namespace bonfire {
namespace {

// Without waiting: the other end of a named pipe may never come.
int open_for_reading(const std::string& path) { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); }

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)), file_(open_for_reading(path_)) {
  if (file_ < 0 && errno == EMFILE && raise_open_files()) file_ = open_for_reading(path_);
  if (file_ < 0) fail_config("'{}': {}", path_, std::strerror(errno));
  struct stat about {};
  const int error = ::fstat(file_, &about) == 0 ? 0 : errno;
  const bool plain = S_ISREG(about.st_mode);
  size_ = static_cast<std::uint64_t>(about.st_size);
  modified_ns_ = std::int64_t{about.st_mtim.tv_sec} * 1'000'000'000 + about.st_mtim.tv_nsec;
  if (error == 0 && plain) return;
  ::close(file_);
  fail_config("'{}': {}", path_, error != 0 ? std::strerror(error) : "is not a file");
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::read(std::uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("'{}': byte {} cannot be read: {}", path_, offset, std::strerror(errno));
    if (got == 0)
      fail("'{}': ends at byte {}, but had {} bytes when it was opened: it has been changed since", path_, offset, size_);
    offset += static_cast<std::uint64_t>(got);
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

std::string InputFile::text(std::uint64_t most) const {
  if (size_ > most) fail_config("'{}': has {} bytes, must have at most {}", path_, size_, most);
  std::string all(size_, '\0');
  read(0, std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace bonfire
