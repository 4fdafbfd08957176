// The cost of planning a pipeline: generating a schedule, adding its messages, validating and simulating it.
//
//   bench_schedule [--repeats 5]
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/size.h"
#include "bonfire/schedule/clock.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/timeline.h"
#include "bonfire/schedule/validate.h"

namespace {

using namespace bonfire;
using namespace bonfire::schedule;

// Milliseconds on one thread: median and least by the wall's clock, and the median of the processor's time, which other
// programs on the machine hardly lengthen.
struct Cost {
  double wall = 0, least = 0, processor = 0;
  Cost operator+(const Cost& other) const { return {wall + other.wall, least + other.least, processor + other.processor}; }
};

Cost median(int repeats, const std::function<void()>& work) {
  std::vector<double> wall, processor;
  for (int i = 0; i < repeats; ++i) {
    const Nanoseconds begin = now_ns();
    const std::clock_t begin_processor = std::clock();
    work();
    wall.push_back(1e3 * seconds_since(begin));
    processor.push_back(1e3 * static_cast<double>(std::clock() - begin_processor) / CLOCKS_PER_SEC);
  }
  std::sort(wall.begin(), wall.end());
  std::sort(processor.begin(), processor.end());
  return {wall[wall.size() / 2], wall.front(), processor[processor.size() / 2]};
}

std::string text(const Cost& cost) { return fmt::format("{:.0f} [{:.0f}] {:.0f}", cost.wall, cost.least, cost.processor); }

void measure(const std::string& name, Shape shape, int repeats) {
  Schedule plain, full;
  const Cost generated = median(repeats, [&] { plain = generate(name, shape); });
  const Cost lowered = median(repeats, [&] { full = lower(plain); });
  const Cost checked = median(repeats, [&] { validate(full, name); });
  const Cost simulated = median(repeats, [&] { simulate(full); });
  std::size_t cells = 0;
  for (const auto& row : full.rows) cells += row.size();
  fmt::print("| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n", name, shape.ranks, shape.chunks, shape.microbatches,
             format_count(static_cast<std::int64_t>(cells)), text(generated), text(lowered), text(checked),
             text(generated + lowered + checked), text(simulated));
}

// Two streams, each task behind the last of the other: the timeline of sharded training, at length.
void measure_clock(int tasks, int repeats) {
  const Cost cost = median(repeats, [&] {
    Clock clock;
    const Resource compute = clock.resource("compute"), wire = clock.resource("wire");
    Task last = clock.task(compute, 1);
    for (int i = 1; i < tasks; i += 2) {
      const Task gather = clock.task(wire, 1, {last});
      last = clock.task(compute, 1, {last, gather});
    }
    clock.run();
  });
  fmt::print("\nSimulator: {} tasks on two resources, issued and run: {} ms\n", format_count(tasks), text(cost));
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc == 3 && std::strcmp(argv[1], "--repeats") == 0 ? std::max(1, std::atoi(argv[2])) : 5;
  fmt::print("Planning, in milliseconds over {} runs: median [minimum] of wall-clock time, then median of CPU time.\n\n",
             repeats);
  fmt::print("| schedule | ranks | chunks | microbatches | cells | generate | add messages | validate | sum | simulate |\n");
  fmt::print("|---|---|---|---|---|---|---|---|---|---|\n");
  measure("1f1b", {8, 64, 1}, repeats);
  measure("zb-h2", {64, 1024, 1}, repeats);
  measure("zb-v", {64, 1024, 2}, repeats);
  measure("interleaved", {64, 1024, 4}, repeats);
  measure_clock(1'000'000, repeats);
  return 0;
}
