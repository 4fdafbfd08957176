#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/output_file.h"
#include "bonfire/base/size.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/pipedream.h"
#include "bonfire/schedule/svg.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/timeline.h"
#include "bonfire/schedule/validate.h"
#include "cli/commands.h"

// Prints or draws a schedule: one that has a name, or a table that a person wrote.
namespace bonfire::cli {
namespace {

struct ScheduleArguments {
  std::string schedule;
  std::optional<int> ranks, microbatches, chunks, minibatches;
  std::vector<int> replicas;
  std::string svg;
  bool messages = false;
  bool json = false;
};

// The options of PipeDream's schedules belong to no other, and theirs not to them.
void refuse_option(const ScheduleArguments& arguments, const char* option, bool given) {
  if (given) fail_config("schedule {}: {} does not go with it", arguments.schedule, option);
}

schedule::RoundRobin round_robin(const ScheduleArguments& arguments, schedule::WeightMode mode) {
  refuse_option(arguments, "--chunks", arguments.chunks.has_value());
  if (!arguments.ranks && arguments.replicas.empty())
    fail_config("schedule {}: --ranks, or --replicas, is required", arguments.schedule);
  schedule::RoundRobin robin{.replicas = arguments.replicas, .mode = mode};
  if (robin.replicas.empty()) {
    if (*arguments.ranks < 1 || *arguments.ranks > 65536)
      fail_config("schedule {}: --ranks {}; allowed: 1 to 65536", arguments.schedule, *arguments.ranks);
    robin.replicas.assign(static_cast<std::size_t>(*arguments.ranks), 1);
  }
  if (arguments.ranks && *arguments.ranks != robin.ranks())
    fail_config("--ranks {}: --replicas {} are {} together", *arguments.ranks, fmt::join(robin.replicas, ","),
                robin.ranks());
  const bool by_minibatch = mode == schedule::WeightMode::stashing || mode == schedule::WeightMode::vertical;
  // Enough to see the pipeline fill, run and drain.
  const auto shape = schedule::endless_shape(robin);
  robin.microbatches = arguments.microbatches.value_or(shape.microbatches);
  robin.minibatches = arguments.minibatches.value_or(by_minibatch ? shape.minibatches : 3);
  return robin;
}

bool has_name(const std::string& name) {
  const auto& names = schedule::schedule_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

schedule::Schedule named_schedule(const ScheduleArguments& arguments) {
  refuse_option(arguments, "--replicas", !arguments.replicas.empty());
  refuse_option(arguments, "--minibatches", arguments.minibatches.has_value());
  const auto needed = [&](const char* option, const std::optional<int>& value) {
    if (!value) fail_config("schedule {}: {} is required", arguments.schedule, option);
    return *value;
  };
  return schedule::generate(arguments.schedule,
                            {.ranks = needed("--ranks", arguments.ranks),
                             .microbatches = needed("--microbatches", arguments.microbatches),
                             .chunks = arguments.chunks.value_or(schedule::natural_chunks(arguments.schedule))});
}

schedule::Schedule written_schedule(const ScheduleArguments& arguments) {
  refuse_option(arguments, "--replicas", !arguments.replicas.empty());
  refuse_option(arguments, "--minibatches", arguments.minibatches.has_value());
  if (!std::filesystem::exists(arguments.schedule))
    fail_config("schedule '{}' is neither a built-in schedule nor a file; allowed: {}, {}, or a file", arguments.schedule,
                fmt::join(schedule::schedule_names(), ", "), fmt::join(schedule::pipedream_names(), ", "));
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
void check(const schedule::Schedule& table, const ScheduleArguments& arguments) {
  const bool many_updates = schedule::weight_mode(arguments.schedule).has_value();
  try {
    schedule::validate(table, arguments.schedule, {.many_updates = many_updates});
  } catch (const schedule::ScheduleError& error) {
    if (!arguments.json) fmt::print("{}", error.table());
    throw;
  }
}

void draw(const std::string& file, const std::string& picture) {
  try {
    write_file(file, picture, Survives::process);
  } catch (const WriteError& error) {
    fail_config("--svg {}", error.what());
  }
}

int terminal_width() {
  winsize size{};
  return isatty(STDOUT_FILENO) != 0 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// What PipeDream's schedules have besides.
struct Asynchronous {
  schedule::RoundRobin robin;
  schedule::Versions versions;
  std::vector<std::vector<int>> staleness;  // by rank, of each update
};

// The most that any update of a rank has.
std::vector<int> most_stale(const Asynchronous& asynchronous) {
  std::vector<int> most;
  for (const auto& updates : asynchronous.staleness)
    most.push_back(updates.empty() ? 0 : *std::max_element(updates.begin(), updates.end()));
  return most;
}

void print_people(const schedule::Schedule& table, const schedule::Timeline& timeline, const std::string& title,
                  const Asynchronous* asynchronous) {
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
  fmt::print("\n{} {:.6g} with forward 1, backward 2 (input and weight gradient 1 each)\n", asynchronous ? "table" : "step",
             timeline.makespan);
  fmt::print("bubble {:.2f}% of the ranks' time\n", 100 * timeline.bubble);
  fmt::print("peak activations by rank: {}\n", fmt::join(timeline.peak_activations, " "));
  if (!asynchronous) return;
  fmt::print("versions of the weights held by rank: {}\n", fmt::join(asynchronous->versions.held, " "));
  fmt::print("staleness of updates by rank, at most: {}\n", fmt::join(most_stale(*asynchronous), " "));
}

void print_json(const schedule::Schedule& table, const schedule::Timeline& timeline, const ScheduleArguments& arguments,
                const Asynchronous* asynchronous) {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& row : table.rows) {
    auto& cells = rows.emplace_back(nlohmann::ordered_json::array());
    for (const auto& action : row) cells.push_back(schedule::to_text(action));
  }
  nlohmann::ordered_json answer{{"schedule", arguments.schedule},
                                {"ranks", table.ranks()},
                                {"stages", table.stages},
                                {"microbatches", table.microbatches},
                                {"makespan", timeline.makespan},
                                {"bubble", timeline.bubble},
                                {"peak_activations", timeline.peak_activations},
                                {"table", std::move(rows)}};
  if (asynchronous) {
    answer["replicas"] = asynchronous->robin.replicas;
    answer["minibatches"] = asynchronous->robin.minibatches;
    answer["versions_held"] = asynchronous->versions.held;
    answer["versions"] = asynchronous->versions.of;
    answer["staleness"] = asynchronous->staleness;
  }
  std::puts(answer.dump().c_str());
}

void show(const ScheduleArguments& arguments) {
  const auto mode = schedule::weight_mode(arguments.schedule);
  std::optional<Asynchronous> asynchronous;
  if (mode) asynchronous.emplace(Asynchronous{.robin = round_robin(arguments, *mode)});
  schedule::Schedule table = mode                           ? schedule::pipedream(asynchronous->robin)
                             : has_name(arguments.schedule) ? named_schedule(arguments)
                                                            : written_schedule(arguments);
  // Replicas of a stage wait for each other there.
  if (mode && asynchronous->robin.ranks() > table.stages)
    table = schedule::add_reductions(std::move(table), schedule::Reduce::once);
  check(table, arguments);
  if (arguments.messages) {
    table = schedule::lower(std::move(table));
    check(table, arguments);
  }
  if (mode) {
    try {
      asynchronous->versions = schedule::versions_of(table, *mode, arguments.schedule);
    } catch (const schedule::ScheduleError& error) {
      if (!arguments.json) fmt::print("{}", error.table());
      throw;
    }
    asynchronous->staleness = schedule::staleness_of(table, asynchronous->versions);
  }
  const schedule::Timeline timeline = schedule::simulate(table);
  std::string title = fmt::format("{}: {} ranks, {} stages, {} microbatches", arguments.schedule, table.ranks(),
                                  table.stages, table.microbatches);
  if (mode)
    title = fmt::format("{}: {} ranks, replicas {}, {} minibatches of {}", arguments.schedule, table.ranks(),
                        fmt::join(asynchronous->robin.replicas, ","), asynchronous->robin.minibatches,
                        asynchronous->robin.microbatches);
  if (!arguments.svg.empty()) draw(arguments.svg, schedule::svg_picture(table, timeline, {.title = title}));
  const Asynchronous* more = asynchronous ? &*asynchronous : nullptr;
  arguments.json ? print_json(table, timeline, arguments, more) : print_people(table, timeline, title, more);
}

}  // namespace

void add_schedule(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<ScheduleArguments>();
  CLI::App* command = program.add_subcommand("schedule", "Print or draw a pipeline schedule, its bubble and its memory");
  command
      ->add_option("NAME|FILE", arguments->schedule,
                   fmt::format("{}, {}, or a file with a table", fmt::join(schedule::schedule_names(), ", "),
                               fmt::join(schedule::pipedream_names(), ", ")))
      ->required()
      ->type_name("");
  command->add_option("--ranks", arguments->ranks, "Pipeline ranks (default for a file: as in the file)")->type_name("P");
  command
      ->add_option("--microbatches", arguments->microbatches,
                   "Microbatches per step, or per minibatch (default for a file: as in the file)")
      ->type_name("M");
  command->add_option("--chunks", arguments->chunks, "Stages per rank (default: 2 for interleaved and zb-v, else 1)")
      ->type_name("V");
  command
      ->add_option("--replicas", arguments->replicas,
                   "PipeDream's schedules: replicas of each stage, such as 3,1 (default: one of each)")
      ->delimiter(',')
      ->type_name("R,…");
  command
      ->add_option("--minibatches", arguments->minibatches,
                   "PipeDream's schedules: minibatches from an empty pipeline to an empty pipeline (default: some)")
      ->type_name("B");
  command->add_option("--svg", arguments->svg, "Draw the schedule to this file")->type_name("FILE.svg");
  command->add_flag("--messages", arguments->messages, "Also show sends and receives");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->callback([arguments, &exit_code] {
    show(*arguments);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
