#include "bonfire/base/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace bonfire {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t collected_bytes = 1 << 16;

std::string message_of(const fs::path& file, int reason, std::string_view during) {
  return fmt::format("'{}': cannot be written: {}{}{}", file.string(), during, during.empty() ? "" : ": ",
                     std::strerror(reason));
}

// A rename would put a file in the place of a device or a pipe.
void require_plain(const fs::path& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0 || S_ISREG(about.st_mode)) return;
  if (S_ISDIR(about.st_mode)) throw WriteError(path, EISDIR);
  throw WriteError(path, EEXIST, "it is not a plain file");
}

fs::path part_of(const fs::path& path) {
  static std::atomic<unsigned> next{0};
  fs::path part = path;
  part += fmt::format(".{}.{}.part", ::getpid(), next++);
  return part;
}

}  // namespace

WriteError::WriteError(const fs::path& file, int reason, std::string_view during)
    : Error(message_of(file, reason, during)), reason_(reason) {}

// Some file systems have no such operation for folders, and keep names without it.
void flush_folder(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int reason = opened < 0 || ::fsync(opened) != 0 ? errno : 0;
  if (opened >= 0) ::close(opened);
  if (reason != 0 && reason != EINVAL)
    throw WriteError(path, reason, "it has its name, but its folder cannot be flushed to the disk");
}

void write_at(int file, const fs::path& path, std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw WriteError(path, written == 0 ? ENOSPC : errno);
    offset += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

OutputFile::OutputFile(fs::path path) : path_(std::move(path)) {
  require_plain(path_);
  // A name that is taken was left by a process that was killed, or belongs to one of another machine with the same folder.
  do {
    part_ = part_of(path_);
    file_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (file_ < 0 && (errno == EEXIST || errno == EINTR));
  if (file_ < 0) throw WriteError(path_, errno);
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() noexcept {
  if (file_ < 0) return;
  ::close(std::exchange(file_, -1));
  ::unlink(part_.c_str());
}

template <class Step>
void OutputFile::attempt(const Step& step) {
  require(file_ >= 0, "'{}': is written after it was finished, or after it could not be", path_.string());
  try {
    step();
  } catch (...) {
    discard();
    throw;
  }
}

void OutputFile::flush() {
  write_at(file_, path_, size_ - collected_.size(), collected_);
  collected_.clear();
}

void OutputFile::append(std::span<const std::byte> bytes) {
  attempt([&] {
    if (collected_.size() + bytes.size() > collected_bytes) flush();
    if (bytes.size() > collected_bytes)
      write_at(file_, path_, size_, bytes);
    else
      collected_.insert(collected_.end(), bytes.begin(), bytes.end());
    size_ += bytes.size();
  });
}

void OutputFile::overwrite(std::uint64_t offset, std::span<const std::byte> bytes) {
  require(offset <= size_ && bytes.size() <= size_ - offset, "'{}': bytes {} to {} of {} cannot be replaced", path_.string(),
          offset, offset + bytes.size(), size_);
  attempt([&] {
    flush();
    write_at(file_, path_, offset, bytes);
  });
}

void OutputFile::commit(Survives survives) {
  attempt([&] {
    flush();
    // An error of the disk is told once: a second fsync would say that all is well.
    if (survives == Survives::power_loss && ::fsync(file_) != 0) throw WriteError(path_, errno, "flushing it to the disk");
    // Closing tells of bytes that a server would not take.
    if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR) {
      const int reason = errno;
      ::unlink(part_.c_str());
      throw WriteError(path_, reason, "closing it");
    }
    if (std::rename(part_.c_str(), path_.c_str()) != 0) {
      const int reason = errno;
      ::unlink(part_.c_str());
      throw WriteError(path_, reason, fmt::format("renaming '{}'", part_.string()));
    }
  });
  if (survives == Survives::power_loss) flush_folder(path_);
}

void write_file(const fs::path& file, std::string_view content, Survives survives) {
  OutputFile output(file);
  output.append(content);
  output.commit(survives);
}

}  // namespace bonfire
