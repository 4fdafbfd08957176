#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

namespace bonfire::fuzz {

// Files for readers that want a path, in memory where the machine has such a folder. They go with the process.
class ScratchFiles {
 public:
  ScratchFiles() {
    const std::filesystem::path parent =
        std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path();
    folder_ = parent / ("bonfire-fuzz-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
  }
  ~ScratchFiles() { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::uint8_t* data, std::size_t size) const {
    const auto path = folder_ / name;
    std::ofstream(path, std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
    return path;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace bonfire::fuzz
