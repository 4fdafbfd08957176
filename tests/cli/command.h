#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

// The real program, as a person would run it.
namespace bonfire::testing {

struct Ended {
  int code = -1;
  std::string out, err;
};

// A folder that goes when the test ends; commands run in it.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "bonfire-test-XXXXXX").string();
    if (!mkdtemp(name.data())) std::abort();
    path_ = name;
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& file, const std::string& text) const { std::ofstream(path_ / file) << text; }
  std::string read(const std::filesystem::path& file) const {
    std::ifstream in(path_ / file);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

  // `arguments` as the shell reads them; `variables` such as "RANK=0 WORLD_SIZE=1" in front.
  Ended bonfire(const std::string& arguments, const std::string& variables = "") const {
    const std::string line = "cd '" + path_.string() + "' && " + variables +
                             " timeout 120 '" BONFIRE_BUILD_DIR "/bonfire' " + arguments + " >out.txt 2>err.txt </dev/null";
    const int status = std::system(line.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read("out.txt"), read("err.txt")};
  }

 private:
  std::filesystem::path path_;
};

}  // namespace bonfire::testing
