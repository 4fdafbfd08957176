#pragma once

#include <filesystem>
#include <string>

namespace bonfire::testing {

struct Said {
  int code = -1;       // -1: ended by a signal
  std::string output;  // stdout and stderr, as they came
};

// Runs a line of shell, to its end.
Said run_shell(const std::string& line);

// A folder that goes when the test ends.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ / name; }
  void write(const std::string& file, const std::string& text) const;
  std::string read(const std::filesystem::path& file) const;

 private:
  std::filesystem::path path_;
};

}  // namespace bonfire::testing
