#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/base/log.h"
#include "bonfire/train/config.h"

namespace bonfire {

// The system would not write a file: "'FILE': cannot be written: No space left on device".
class BONFIRE_API WriteError : public Error {
 public:
  WriteError(const std::filesystem::path& file, int reason);
  int reason() const { return reason_; }  // errno

 private:
  int reason_;
};

// A file that grows by whole records: one that does not fit leaves nothing of itself.
class BONFIRE_API RunFile {
 public:
  enum class Start { empty, at_end };
  // Makes the file where there is none. Throws WriteError.
  RunFile(std::filesystem::path path, Start start);
  ~RunFile();
  RunFile(const RunFile&) = delete;
  RunFile& operator=(const RunFile&) = delete;

  // Throws WriteError; the file is then as before.
  void append(std::string_view record);

 private:
  std::filesystem::path path_;
  int file_ = -1;
  std::int64_t size_ = 0;
};

// Writes a file so that a reader finds either all of it or nothing. Throws WriteError.
BONFIRE_API void write_file(const std::filesystem::path& file, std::string_view content);

// What becomes of a run whose files cannot be written: [run] disk_full.
class BONFIRE_API DiskPolicy {
 public:
  DiskPolicy(const Config& config, Log log);

  // Calls `write`, which writes to `file`. Where it throws WriteError: an Error that ends the run (`stop`), or a warning,
  // once until the file can be written again.
  void attempt(const std::filesystem::path& file, const std::function<void()>& write);
  // Training is over: there is nothing left to stop.
  void finish() { stops_ = false; }

 private:
  bool stops_;
  Log log_;
  std::map<std::filesystem::path, int> missed_;  // attempts that failed since the last that did not
};

}  // namespace bonfire
