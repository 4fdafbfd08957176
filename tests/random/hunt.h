#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/random/isolate.h"

// Goes through seeds, and makes the smallest case of each that fails.
namespace bonfire::cases {

// From the environment: BONFIRE_SEED, the first seed; BONFIRE_CASES, how many; BONFIRE_SIMPLER, the way from the seed's case
// to a simpler one, as a failure has printed it; BONFIRE_SHRINK=0: failures are only listed; BONFIRE_JOBS: cases at a time.
struct HuntSettings {
  std::uint64_t seed = 1;
  int cases = 1;
  std::vector<int> simpler{};
  bool shrink = true;
  int jobs = 2;
};
HuntSettings hunt_settings(int cases);

// The lines of a failed hunt; nothing where all cases are well.
struct HuntReport {
  std::vector<std::string> failures;
};
std::string failure_text(const std::string& test, std::uint64_t seed, const std::vector<int>& way, const std::string& text,
                         const std::string& wrong);
bool is_failure(const std::string& result);

template <class Case>
struct Kind {
  std::string test;  // the name that repeats it: "Random.Engines"
  std::function<Case(std::uint64_t seed)> draw;
  std::function<std::string(const Case&)> run;
};

// From a failing case to a simpler one that fails too, step by step: which of its simpler variants each step took.
template <class Case>
Case shrink(const Kind<Case>& kind, Case failing, int jobs, std::vector<int>& way, std::string& wrong) {
  constexpr int most_runs = 400;
  for (int runs = 0; runs < most_runs;) {
    const auto variants = simpler(failing);
    bool found = false;
    for (int begin = 0; begin < static_cast<int>(variants.size()) && !found && runs < most_runs; begin += jobs) {
      const int count = std::min(jobs, static_cast<int>(variants.size()) - begin);
      const auto results =
          run_isolated(count, jobs, [&](int at) { return kind.run(variants[static_cast<std::size_t>(begin + at)]); });
      runs += count;
      for (int at = 0; at < count && !found; ++at) {
        if (!is_failure(results[static_cast<std::size_t>(at)])) continue;
        found = true;
        way.push_back(begin + at);
        wrong = results[static_cast<std::size_t>(at)];
        failing = variants[static_cast<std::size_t>(begin + at)];
      }
    }
    if (!found) break;
  }
  return failing;
}

template <class Case>
HuntReport hunt(const Kind<Case>& kind, const HuntSettings& settings) {
  const auto case_of = [&](int at) {
    Case each = kind.draw(settings.seed + static_cast<std::uint64_t>(at));
    for (const int step : settings.simpler) each = simpler(each).at(static_cast<std::size_t>(step));
    return each;
  };
  const auto results = run_isolated(settings.cases, settings.jobs, [&](int at) { return kind.run(case_of(at)); });
  HuntReport report;
  int shrunk = 0;
  for (int at = 0; at < settings.cases; ++at) {
    std::string wrong = results[static_cast<std::size_t>(at)];
    if (wrong.empty()) continue;
    Case each = case_of(at);
    std::vector<int> way = settings.simpler;
    constexpr int most_shrunk = 3;
    if (settings.shrink && is_failure(wrong) && shrunk++ < most_shrunk) each = shrink(kind, each, settings.jobs, way, wrong);
    report.failures.push_back(
        failure_text(kind.test, settings.seed + static_cast<std::uint64_t>(at), way, text_of(each), wrong));
  }
  return report;
}

}  // namespace bonfire::cases
