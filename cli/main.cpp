#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/descriptors.h"
#include "cli/commands.h"
#include "cli/last_words.h"
#include "cli/requests.h"
#include "cli/words.h"

namespace {

int complain(const std::string& message, int code) {
  std::fflush(stdout);
  bonfire::cli::say_last("bonfire: " + message + "\n");
  return code;
}

// What was printed must have arrived: a script must not be told that all went well where its object was lost.
int end_with(int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  const int reason = errno;  // 0: an earlier flush has lost it
  return complain(
      std::string("stdout cannot be written") + (reason != 0 ? ": " : "") + (reason != 0 ? std::strerror(reason) : ""),
      code == bonfire::cli::kDone ? bonfire::cli::kFailed : code);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace bonfire::cli;
  bonfire::keep_standard_streams();
  int exit_code = kDone;
  CLI::App program("Bonfire: distributed training with LibTorch.", "bonfire");
  program.set_version_flag("--version", "bonfire " BONFIRE_VERSION " (LibTorch " BONFIRE_TORCH_VERSION ")");
  program.require_subcommand(1);
  add_train(program, exit_code);
  add_launch(program, exit_code);
  add_partition(program, exit_code);
  add_plan(program, exit_code);
  add_profile(program, exit_code);
  CLI::App* bench = program.add_subcommand("bench", "Run benchmarks");
  bench->require_subcommand(1);
  add_bench_comm(*bench, exit_code);
  add_bench_step(*bench, exit_code);
  add_checkpoint(program, exit_code);
  add_doctor(program, exit_code);
  add_schedule(program, exit_code);
  add_tokens(program, exit_code);
  program.add_subcommand("help", "Show the help of a command: bonfire help train")->prefix_command();

  const std::vector<std::string> arguments(argv + 1, argv + argc);
  // Commands that start ranks, or are one, answer requests to stop themselves.
  const bool runs = !arguments.empty() && (arguments[0] == "train" || arguments[0] == "launch" || arguments[0] == "bench");
  runs ? outlive_readers() : let_requests_through();
  try {
    if (!arguments.empty() && arguments.front() == "help") {
      fmt::print("{}", help_about(program, {arguments.begin() + 1, arguments.end()}));
      return end_with(kDone);
    }
    if (const auto wrong = wrong_command(program, arguments)) return complain(*wrong, kBadRequest);
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return end_with(program.exit(error));  // --help, --version
    const bool extras = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
    return complain(extras ? wrong_options(program) : error.what(), kBadRequest);
  } catch (const bonfire::ConfigError& error) {
    return complain(error.what(), kBadRequest);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  }
  return end_with(exit_code);
}
