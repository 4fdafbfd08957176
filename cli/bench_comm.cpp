#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/bandwidth.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/join.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/stop_signals.h"
#include "cli/commands.h"
#include "cli/last_words.h"
#include "cli/limits.h"
#include "cli/requests.h"

namespace bonfire::cli {
namespace {

const std::map<std::string, CollectiveKind>& kinds() {
  static const std::map<std::string, CollectiveKind> names = [] {
    std::map<std::string, CollectiveKind> all;
    for (int at = 0; at < static_cast<int>(CollectiveKind::barrier); ++at) {
      const auto kind = static_cast<CollectiveKind>(at);
      if (kind != CollectiveKind::receive) all[name_of(kind)] = kind;
    }
    return all;
  }();
  return names;
}

const std::map<std::string, at::ScalarType>& dtypes() {
  static const std::map<std::string, at::ScalarType> names{
      {"fp32", at::kFloat}, {"fp64", at::kDouble}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}, {"int64", at::kLong}};
  return names;
}

struct CommArguments {
  std::vector<std::string> collectives{"all_reduce"};
  std::string dtype = "fp32", device = "auto";
  std::int64_t from = 1 << 10, to = 1 << 24;
  int factor = 4, repeats = 20, transfers = 1;
  std::optional<int> ranks;
  bool json = false;
};

c10::Device choose_device(const std::string& name, const Environment& place) {
  if (name == "cpu" || (name == "auto" && !gpu_available())) return c10::Device(c10::kCPU);
  if (!gpu_available()) fail_config("--device cuda: {}", gpu_unavailable_reason());
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(place.local_rank % gpu_count()));
  set_current(device);
  return device;
}

void print_header(const World& world, const char* collective, const CommArguments& arguments) {
  fmt::print("# {} of {} over {} ranks on {}, median of {}\n", collective, arguments.dtype, world.size(),
             world.device().str(), arguments.repeats);
  fmt::print("# {:>12} {:>12} {:>12} {:>10} {:>10} {:>10} {:>8}\n", "size", "count", "time", "issue", "algbw", "busbw",
             "#wrong");
  fmt::print("# {:>12} {:>12} {:>12} {:>10} {:>10} {:>10}\n", "(B)", "(elements)", "(us)", "(us)", "(GB/s)", "(GB/s)");
}

void print_row(const BandwidthRow& row) {
  fmt::print("  {:>12} {:>12} {:>12.1f} {:>10.1f} {:>10.3f} {:>10.3f} {:>8}\n", row.bytes, row.elements, row.seconds * 1e6,
             row.issue_seconds * 1e6, row.algorithm_bytes * 1e-9, row.bus_bytes * 1e-9, row.wrong);
  std::fflush(stdout);
}

// What one rank does. Returns the exit code: wrong results are a failure.
int measure(const World& world, const CommArguments& arguments) {
  nlohmann::json tables = nlohmann::json::array();
  bool wrong = false;
  const bool speaks = world.rank() == 0;
  for (const auto& name : arguments.collectives) {
    if (speaks && !arguments.json) print_header(world, name.c_str(), arguments);
    const auto rows = measure_bandwidth(world,
                                        {.kind = kinds().at(name),
                                         .dtype = dtypes().at(arguments.dtype),
                                         .least_bytes = arguments.from,
                                         .most_bytes = arguments.to,
                                         .factor = arguments.factor,
                                         .repeats = arguments.repeats,
                                         .transfers = arguments.transfers},
                                        [&](const BandwidthRow& row) {
                                          if (speaks && !arguments.json) print_row(row);
                                        });
    nlohmann::json list = nlohmann::json::array();
    for (const auto& row : rows) {
      wrong |= row.wrong != 0;
      list.push_back({{"bytes", row.bytes},
                      {"seconds", row.seconds},
                      {"issue_seconds", row.issue_seconds},
                      {"algorithm_bytes_per_second", row.algorithm_bytes},
                      {"bus_bytes_per_second", row.bus_bytes},
                      {"wrong", row.wrong}});
    }
    tables.push_back({{"collective", name},
                      {"dtype", arguments.dtype},
                      {"ranks", world.size()},
                      {"device", world.device().str()},
                      {"rows", list}});
  }
  if (speaks && arguments.json) fmt::print("{}\n", tables.dump());
  return wrong ? kFailed : kDone;
}

// Benchmarks have nothing to finish.
[[noreturn]] void stop_here(int rank) {
  if (rank == 0) say_last("bonfire: stopped on request\n");
  std::_Exit(kStoppedAfterSaving);
}

// On this machine; 1: this process is the one, or one that somebody else has started.
int ranks_to_start(const CommArguments& arguments, const Environment& place, const Variables& variables) {
  if (place.source != LaunchSource::none && !place.launches_itself) return 1;
  end_on_request();  // a driver may take long to start
  if (arguments.ranks) return *arguments.ranks;
  if (const auto asked = asked_ranks(variables)) return *asked;
  return arguments.device == "cpu" ? 1 : std::max(1, gpu_count());
}

int start(const CommArguments& arguments, const std::vector<std::string>& words) {
  const Variables variables = process_variables();
  const Environment place = resolve_environment(variables);
  if (const int ranks = ranks_to_start(arguments, place, variables); ranks > 1) {
    LauncherOptions launcher;
    launcher.program = {std::filesystem::read_symlink("/proc/self/exe").string()};
    launcher.program.insert(launcher.program.end(), words.begin(), words.end());
    launcher.ranks = ranks;
    launcher.echo = Echo::first;
    launcher.ranks_take_signals = true;
    launcher.prepare = [](LauncherOptions&) { launcher_hears_requests(); };
    const LaunchOutcome outcome = launch_ranks(std::move(launcher));
    if (outcome.exit_code == kDone && outcome.stdout_error != 0)
      fail("stdout cannot be written: {}", std::strerror(outcome.stdout_error));
    return outcome.exit_code;
  }
  StopSignals& requests = StopSignals::take([rank = place.rank] { stop_here(rank); });
  JoinOptions join;
  join.stop = &requests;
  join.device = [&](const Environment& where) { return choose_device(arguments.device, where); };
  const int code = run_rank(std::move(join), [&](World& world) {
    requests.answer_with([rank = world.rank()] { stop_here(rank); });
    const int code = measure(world, arguments);
    requests.answer_with({});
    return code;
  });
  if (code == kStoppedAfterSaving) stop_here(place.rank);  // before all had joined
  return code;
}

}  // namespace

void add_bench_comm(CLI::App& bench, int& exit_code) {
  auto arguments = std::make_shared<CommArguments>();
  CLI::App* command =
      bench.add_subcommand("comm", "Measure time and bandwidth of collectives by size, and check their results");
  command->add_option("collective", arguments->collectives, "Collectives to measure")
      ->check(CLI::IsMember(kinds()))
      ->capture_default_str();
  command
      ->add_option("--ranks", arguments->ranks,
                   "Number of local ranks to start (default: from the launcher, else BONFIRE_RANKS, else one per GPU)")
      ->check(at_least(1));
  command->add_option("--dtype", arguments->dtype, "Element type")->check(CLI::IsMember(dtypes()))->capture_default_str();
  command->add_option("--device", arguments->device, "Device; auto uses a GPU if there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--from", arguments->from, "Smallest size in bytes")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  command->add_option("--to", arguments->to, "Largest size in bytes")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  command->add_option("--factor", arguments->factor, "Factor between one size and the next")
      ->check(CLI::Range(2, 1024))
      ->capture_default_str();
  command->add_option("--repeats", arguments->repeats, "Repeats per size")->check(at_least(1))->capture_default_str();
  command->add_option("--transfers", arguments->transfers, "Number of tensors per all_gather or reduce_scatter")
      ->check(at_least(1))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print the results as JSON");

  command->callback([arguments, &exit_code] {
    std::vector<std::string> words{"bench", "comm"};
    words.insert(words.end(), arguments->collectives.begin(), arguments->collectives.end());
    const auto option = [&](const char* name, const auto& value) {
      words.insert(words.end(), {name, fmt::format("{}", value)});
    };
    option("--dtype", arguments->dtype);
    option("--device", arguments->device);
    option("--from", arguments->from);
    option("--to", arguments->to);
    option("--factor", arguments->factor);
    option("--repeats", arguments->repeats);
    option("--transfers", arguments->transfers);
    if (arguments->json) words.emplace_back("--json");
    if (arguments->to < arguments->from) fail_config("--to {} is smaller than --from {}", arguments->to, arguments->from);
    exit_code = start(*arguments, words);
  });
}

}  // namespace bonfire::cli
