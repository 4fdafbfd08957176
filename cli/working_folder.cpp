#include <unistd.h>

#include <cstring>

namespace {

// In a folder that was deleted Intel's library inside of LibTorch ends the process while it is loaded, with words about a
// file that cannot be loaded. So this runs before the libraries do, and uses nothing of theirs.
void require_working_folder() {
  char folder[4096];
  if (getcwd(folder, sizeof folder) != nullptr) return;
  const char* words = "bonfire: the working folder does not exist any more: change to another one\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, std::strlen(words));
  _exit(2);
}

__attribute__((section(".preinit_array"), used)) void (*const before_libraries)() = require_working_folder;

}  // namespace
