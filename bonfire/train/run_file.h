#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/base/output_file.h"
#include "bonfire/train/config.h"

namespace bonfire {

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
