#include "tests/support/shell.h"

#include <stdlib.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "bonfire/base/error.h"

namespace bonfire::testing {

Said run_shell(const std::string& line) {
  FILE* pipe = popen(("{ " + line + "\n} 2>&1 </dev/null").c_str(), "r");
  require(pipe != nullptr, "cannot start a shell");
  Said said;
  std::array<char, 4096> buffer{};
  while (const std::size_t bytes = fread(buffer.data(), 1, buffer.size(), pipe)) said.output.append(buffer.data(), bytes);
  const int status = pclose(pipe);
  said.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return said;
}

Folder::Folder() {
  std::string name = std::filesystem::temp_directory_path() / "bonfire-test-XXXXXX";
  require(mkdtemp(name.data()) != nullptr, "cannot make {}", name);
  path_ = name;
}

Folder::~Folder() { std::filesystem::remove_all(path_); }

void Folder::write(const std::string& file, const std::string& text) const { std::ofstream(path_ / file) << text; }

std::string Folder::read(const std::filesystem::path& file) const {
  std::ostringstream text;
  text << std::ifstream(path_ / file).rdbuf();
  return text.str();
}

}  // namespace bonfire::testing
