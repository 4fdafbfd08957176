#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/passes.h"
#include "bonfire/schedule/svg.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/timeline.h"
#include "bonfire/schedule/validate.h"
#include "cli/commands.h"

// Prints or draws a schedule: one that has a name, or a table that a person wrote.
namespace bonfire::cli {
namespace {

struct Arguments {
  std::string schedule;
  std::optional<int> ranks, microbatches, chunks;
  std::string svg;
  bool messages = false;
  bool json = false;
};

bool has_name(const std::string& name) {
  const auto& names = schedule::schedule_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

schedule::Schedule named_schedule(const Arguments& arguments) {
  const auto needed = [&](const char* option, const std::optional<int>& value) {
    if (!value) fail_config("schedule {}: {} is required", arguments.schedule, option);
    return *value;
  };
  return schedule::generate(arguments.schedule,
                            {.ranks = needed("--ranks", arguments.ranks),
                             .microbatches = needed("--microbatches", arguments.microbatches),
                             .chunks = arguments.chunks.value_or(schedule::natural_chunks(arguments.schedule))});
}

schedule::Schedule written_schedule(const Arguments& arguments) {
  if (!std::filesystem::exists(arguments.schedule))
    fail_config("schedule '{}' is no name and no file; allowed: {}, or a file", arguments.schedule,
                fmt::join(schedule::schedule_names(), ", "));
  const schedule::Schedule table = schedule::read_table(arguments.schedule);
  const auto agree = [&](const char* option, const std::optional<int>& asked, int has) {
    if (asked && *asked != has) fail_config("{} {}: the table in '{}' has {}", option, *asked, arguments.schedule, has);
  };
  agree("--ranks", arguments.ranks, table.ranks());
  agree("--microbatches", arguments.microbatches, table.microbatches);
  if (arguments.chunks && *arguments.chunks * table.ranks() != table.stages)
    fail_config("--chunks {}: the table in '{}' has {} stages on {} ranks", *arguments.chunks, arguments.schedule,
                table.stages, table.ranks());
  return table;
}

// The table where the mistake is goes to people; the line that names it, to main().
void check(const schedule::Schedule& table, const Arguments& arguments) {
  try {
    schedule::validate(table, arguments.schedule);
  } catch (const schedule::ScheduleError& error) {
    if (!arguments.json) fmt::print("{}", error.table());
    throw;
  }
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out) fail_config("--svg '{}' cannot be written: {}", path, std::strerror(errno));
}

int terminal_width() {
  winsize size{};
  return isatty(STDOUT_FILENO) != 0 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

void print_people(const schedule::Schedule& table, const schedule::Timeline& timeline, const std::string& title) {
  constexpr std::size_t kMostOnTerminal = 20000;
  std::size_t cells = 0;
  for (const auto& row : table.rows) cells += row.size();
  const int width = terminal_width();
  fmt::print("{}\n\n", title);
  if (width > 0 && cells > kMostOnTerminal)
    fmt::print("{} cells are too many for a terminal: send them to a file, or use --svg or --json\n",
               format_count(static_cast<std::int64_t>(cells)));
  else
    fmt::print("{}", schedule::table_text(table, timeline, {.width = width}));
  fmt::print("\nstep {:.6g} with forward 1, backward 2 (input and weight gradient 1 each)\n", timeline.makespan);
  fmt::print("bubble {:.2f}% of the ranks' time\n", 100 * timeline.bubble);
  fmt::print("peak activations by rank: {}\n", fmt::join(timeline.peak_activations, " "));
}

void print_json(const schedule::Schedule& table, const schedule::Timeline& timeline, const Arguments& arguments) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    auto& cells = rows.emplace_back(nlohmann::ordered_json::array());
    for (const auto& action : row) cells.push_back(schedule::to_text(action));
  }
  const nlohmann::ordered_json answer{{"schedule", arguments.schedule},
                                      {"ranks", table.ranks()},
                                      {"stages", table.stages},
                                      {"microbatches", table.microbatches},
                                      {"makespan", timeline.makespan},
                                      {"bubble", timeline.bubble},
                                      {"peak_activations", timeline.peak_activations},
                                      {"table", std::move(rows)}};
  std::puts(answer.dump().c_str());
}

void show(const Arguments& arguments) {
  schedule::Schedule table = has_name(arguments.schedule) ? named_schedule(arguments) : written_schedule(arguments);
  check(table, arguments);
  if (arguments.messages) {
    table = schedule::lower(std::move(table));
    check(table, arguments);
  }
  const schedule::Timeline timeline = schedule::simulate(table);
  const std::string title = fmt::format("{}: {} ranks, {} stages, {} microbatches", arguments.schedule, table.ranks(),
                                        table.stages, table.microbatches);
  if (!arguments.svg.empty()) write_file(arguments.svg, schedule::svg_picture(table, timeline, {.title = title}));
  if (arguments.json)
    print_json(table, timeline, arguments);
  else
    print_people(table, timeline, title);
}

}  // namespace

void add_schedule(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("schedule", "Print or draw a pipeline schedule, its bubble and its memory");
  command
      ->add_option("NAME|FILE", arguments->schedule,
                   fmt::format("{}, or a file with a table", fmt::join(schedule::schedule_names(), ", ")))
      ->required()
      ->type_name("");
  command->add_option("--ranks", arguments->ranks, "Ranks of the pipeline (of a file: as it says)")->type_name("P");
  command->add_option("--microbatches", arguments->microbatches, "Microbatches of a step (of a file: as it says)")
      ->type_name("M");
  command->add_option("--chunks", arguments->chunks, "Stages per rank (default: 2 for interleaved and zb-v, else 1)")
      ->type_name("V");
  command->add_option("--svg", arguments->svg, "Draw it into this file")->type_name("FILE.svg");
  command->add_flag("--messages", arguments->messages, "Show sends and receives too");
  command->add_flag("--json", arguments->json, "Print one object");
  command->callback([arguments, &exit_code] {
    show(*arguments);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
