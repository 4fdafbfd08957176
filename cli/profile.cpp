#include <cstdio>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <CLI/App.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/output_file.h"
#include "bonfire/base/size.h"
#include "bonfire/train/profile_model.h"
#include "cli/commands.h"
#include "cli/config_arguments.h"

// PipeDream's profiler: what each Unit of a model costs on one rank.
namespace bonfire::cli {
namespace {

struct ProfileArguments {
  ConfigArguments config;
  int repeats = 10;
  std::string output;
  bool json = false;
};

void print_profile(const plan::Profile& profile) {
  fmt::print("{}; minibatches of {} samples in microbatches of {}, on {}\n\n", profile.model, profile.batch,
             profile.microbatch, profile.device);
  fmt::print("{:<16} {:>12} {:>10} {:>12} {:>10} {:>11} {:>11} {:>11}\n", "Unit", "forward", "spread", "backward", "spread",
             "output", "parameters", "saved");
  for (const auto& unit : profile.units)
    fmt::print("{:<16} {:>12} {:>10} {:>12} {:>10} {:>11} {:>11} {:>11}\n", unit.name, format_seconds(unit.forward),
               format_seconds(unit.forward_spread), format_seconds(unit.backward), format_seconds(unit.backward_spread),
               format_bytes(unit.output_bytes), format_bytes(unit.parameter_bytes), format_bytes(unit.saved_bytes));
}

void profile(const ProfileArguments& arguments) {
  Config config = load_config(arguments.config.file, arguments.config.overrides);
  // Of one rank, whatever layout it is for.
  keep_units_alone(config);
  resolve(config, 1);
  const auto measured = profile_model(config, arguments.repeats);
  const auto text = plan::to_json(measured);
  if (!arguments.output.empty()) try {
      write_file(arguments.output, text, Survives::process);
    } catch (const WriteError& error) {
      fail_config("-o {}", error.what());
    }
  if (arguments.json)
    fmt::print("{}", text);
  else
    print_profile(measured);
}

}  // namespace

void add_profile(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<ProfileArguments>();
  CLI::App* command = program.add_subcommand("profile", "Measure what each Unit of a model costs, for bonfire partition");
  arguments->config.add_to(*command);
  command->add_option("--repeats", arguments->repeats, "Number of timed runs of each Unit, after a warm-up (default: 10)")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  command->add_option("-o", arguments->output, "Write the profile to this file")->type_name("PROFILE.json");
  command->add_flag("--json", arguments->json, "Print the profile");
  command->callback([arguments, &exit_code] {
    profile(*arguments);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
