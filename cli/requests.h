#pragma once

namespace bonfire::cli {

// Whoever reads what this process writes may leave: that ends no run. What is written then fails, for those who ask whether
// it has arrived. Not for programs that this one starts.
void outlive_readers();

// What becomes of requests to stop (SIGINT, SIGTERM, SIGHUP, SIGUSR1), which are blocked when main begins. One of these is
// called before a command does anything that takes time; a rank has StopSignals instead. What was inherited as ignored stays
// ignored.

// They do what they do to any program.
void let_requests_through();
// They end this process at once, with a line and exit code 3: until the launcher hears them.
void end_on_request();
// The launcher hears them from here on, and when it has returned, it is known how the ranks have ended: SIGUSR1 comes too
// late to change that, and the others end this process as they do any program. For LauncherOptions::prepare.
void launcher_hears_requests();

// What a run says that was stopped before it had begun.
void say_stopped_before_the_start();

}  // namespace bonfire::cli
