#include <cstdio>
#include <exception>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/descriptors.h"
#include "cli/commands.h"

namespace {

int complain(const char* message, int code) {
  std::fflush(stdout);
  std::fprintf(stderr, "bonfire: %s\n", message);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace bonfire::cli;
  bonfire::keep_standard_streams();
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

  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return program.exit(error);  // --help, --version
    return complain(error.what(), kBadRequest);
  } catch (const bonfire::ConfigError& error) {
    return complain(error.what(), kBadRequest);
  } catch (const std::exception& error) {
    return complain(error.what(), kFailed);
  }
  return exit_code;
}
