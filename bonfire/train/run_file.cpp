#include "bonfire/train/run_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <utility>

namespace bonfire {
namespace fs = std::filesystem;

RunFile::RunFile(fs::path path, Start start) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (start == Start::empty ? O_TRUNC : 0), 0666);
  if (file_ < 0) throw WriteError(path_, errno);
  struct stat about {};
  if (::fstat(file_, &about) == 0) size_ = about.st_size;
}

RunFile::~RunFile() { ::close(file_); }

void RunFile::append(std::string_view record) {
  try {
    write_at(file_, path_, static_cast<std::uint64_t>(size_), std::as_bytes(std::span(record)));
  } catch (const WriteError&) {
    [[maybe_unused]] const int shortened = ::ftruncate(file_, size_);
    throw;
  }
  size_ += static_cast<std::int64_t>(record.size());
}

DiskPolicy::DiskPolicy(const Config& config, Log log) : stops_(config.run.disk_full == "stop"), log_(std::move(log)) {}

void DiskPolicy::attempt(const fs::path& file, const std::function<void()>& write) {
  try {
    write();
  } catch (const WriteError& error) {
    if (stops_) fail("{}; the run ends (run.disk_full = stop, allowed: warn | stop)", error.what());
    if (++missed_[file] == 1) log_.warning("{}; training goes on without it (run.disk_full = warn)", error.what());
    return;
  }
  if (const auto missed = missed_.extract(file); !missed.empty())
    log_.info("'{}' is written again; {} in between could not be", file.string(),
              missed.mapped() == 1 ? "1 record" : fmt::format("{} records", missed.mapped()));
}

}  // namespace bonfire
