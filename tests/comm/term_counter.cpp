// Says which SIGTERMs it is sent: by kill, or with a value that only programs of Bonfire know.
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  puts("up");
  fflush(stdout);
  siginfo_t about;
  while (sigwaitinfo(&set, &about) == SIGTERM) {
    puts(about.si_code == SI_USER ? "plain SIGTERM" : "strange SIGTERM");
    fflush(stdout);
  }
}
