// How long does the partitioner take? 100 Units on 64 ranks in three levels, and PipeDream's published profiles.
//
//   bench_partition [PROFILES.json]
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "bonfire/base/clock.h"
#include "bonfire/plan/partition.h"

namespace {

using namespace bonfire;

void row(const std::string& name, const plan::Profile& profile, const plan::Topology& topology) {
  std::vector<double> seconds;
  plan::Partition found;
  for (int time = 0; time < 5; ++time) {
    const auto begin = now_ns();
    found = plan::partition(profile, topology);
    seconds.push_back(seconds_since(begin));
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf("%-34s %7d %14lld %12.1f\n", name.c_str(), static_cast<int>(profile.units.size()),
              static_cast<long long>(found.considered), 1e3 * seconds[2]);
}

}  // namespace

int main(int argc, char** argv) {
  std::mt19937 random(1);
  const auto between = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  plan::Profile profile{.model = "drawn"};
  for (int unit = 0; unit < 100; ++unit)
    profile.units.push_back({.forward = 1e-3 * between(1, 9),
                             .backward = 1e-3 * between(1, 20),
                             .output_bytes = 100'000 * between(1, 20),
                             .parameter_bytes = 1'000'000 * between(1, 20),
                             .saved_bytes = 1'000'000 * between(1, 20)});
  std::printf("%-34s %7s %14s %12s\n", "problem", "Units", "compared", "ms (median)");
  const plan::Topology levels{.levels = {{4, 25e9}, {4, 5e9}, {4, 1.25e9}}};
  row("4 x 4 x 4 ranks", profile, levels);
  auto limited = levels;
  limited.memory = 2'000'000'000;
  row("4 x 4 x 4 ranks, limited memory", profile, limited);
  row("8 x 8 ranks", profile, {.levels = {{8, 25e9}, {8, 1.25e9}}});
  row("64 ranks", profile, {.levels = {{64, 25e9}}});
  for (const char* model : {"vgg16", "resnet50", "gnmt", "gnmt_large"})
    if (argc > 1) row(std::string(model) + ", 16 ranks", plan::read_profile(argv[1], model), {.levels = {{16, 1.25e9}}});
}
