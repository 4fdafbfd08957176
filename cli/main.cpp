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
#include "cli/commands.h"
#include "cli/words.h"

namespace {

int complain(const std::string& message, int code) {
  std::fflush(stdout);
  std::fprintf(stderr, "bonfire: %s\n", message.c_str());
  return code;
}

// What was printed must have arrived: a script must not be told that all went well where its object was lost.
int end_with(int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  // An earlier flush has lost the reason.
  return complain("stdout cannot be written" + (errno != 0 ? fmt::format(": {}", std::strerror(errno)) : std::string()),
                  code == bonfire::cli::kDone ? bonfire::cli::kFailed : code);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace bonfire::cli;
  int exit_code = kDone;
  CLI::App program("Bonfire trains one model on many GPUs.", "bonfire");
  program.set_version_flag("--version", "bonfire " BONFIRE_VERSION " (LibTorch " BONFIRE_TORCH_VERSION ")");
  program.require_subcommand(1);
  add_train(program, exit_code);
  add_launch(program, exit_code);
  add_plan(program, exit_code);
  CLI::App* bench = program.add_subcommand("bench", "Measure");
  bench->require_subcommand(1);
  add_bench_comm(*bench, exit_code);
  add_bench_step(*bench, exit_code);
  add_doctor(program, exit_code);
  add_schedule(program, exit_code);
  add_tokens(program, exit_code);
  program.add_subcommand("help", "Say what a command does: bonfire help train")->prefix_command();

  const std::vector<std::string> arguments(argv + 1, argv + argc);
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
