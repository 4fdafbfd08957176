// Preloaded into a program: sends it the signal REQUEST_SIGNAL when a call that REQUEST_AT names has been made, which no
// test could time from outside.
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

char call[32];
int request = 0;

__attribute__((constructor)) void begin() {
  const char *at = getenv("REQUEST_AT"), *number = getenv("REQUEST_SIGNAL");
  if (at == nullptr || number == nullptr) return;
  strncpy(call, at, sizeof call - 1);
  request = atoi(number);
  unsetenv("LD_PRELOAD");  // for this program alone
}

// Once, where all is as the call has left it.
template <class Result>
Result made(const char* name, Result result) {
  if (request != 0 && strcmp(call, name) == 0) {
    const int signal = request;
    request = 0;
    raise(signal);
  }
  return result;
}

}  // namespace

extern "C" int mkdir(const char* path, mode_t mode) {
  static const auto next = reinterpret_cast<int (*)(const char*, mode_t)>(dlsym(RTLD_NEXT, "mkdir"));
  return made("mkdir", next(path, mode));
}

extern "C" char* mkdtemp(char* name) {
  static const auto next = reinterpret_cast<char* (*)(char*)>(dlsym(RTLD_NEXT, "mkdtemp"));
  return made("mkdtemp", next(name));
}

extern "C" int unlinkat(int folder, const char* path, int flags) {
  static const auto next = reinterpret_cast<int (*)(int, const char*, int)>(dlsym(RTLD_NEXT, "unlinkat"));
  return made("unlinkat", next(folder, path, flags));
}
