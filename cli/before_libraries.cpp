#include <unistd.h>

#include <csignal>
#include <cstring>

namespace {

// LibTorch takes a second to load. Whoever asks this process to stop meanwhile is heard as soon as the command knows what
// that means for it (requests.h). No thread exists yet that could take a signal in its place.
void hold_requests() {
  sigset_t requests;
  sigemptyset(&requests);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGURG}) sigaddset(&requests, signal);
  sigprocmask(SIG_BLOCK, &requests, nullptr);
}

// In a folder that was deleted Intel's library inside of LibTorch ends the process while it is loaded, with words about a
// file that cannot be loaded.
void require_working_folder() {
  char folder[4096];
  if (getcwd(folder, sizeof folder) != nullptr) return;
  const char* words = "bonfire: the working folder does not exist any more: change to another one\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, std::strlen(words));
  _exit(2);
}

// These run before the libraries do, and use nothing of theirs.
__attribute__((section(".preinit_array"), used)) void (*const before_libraries[])() = {hold_requests,
                                                                                       require_working_folder};

}  // namespace
