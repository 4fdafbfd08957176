#include "tests/random/hunt.h"

#include <cstdlib>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/random/verdict.h"

namespace bonfire::cases {

HuntSettings hunt_settings(int cases) {
  HuntSettings settings{.cases = cases};
  settings.jobs = static_cast<int>(std::max(1u, std::min(4u, std::thread::hardware_concurrency())));
  if (const char* const text = std::getenv("BONFIRE_SEED"))
    settings.seed = std::strtoull(text, nullptr, 10), settings.cases = 1;
  if (const char* const text = std::getenv("BONFIRE_CASES")) settings.cases = std::atoi(text);
  if (const char* const text = std::getenv("BONFIRE_SHRINK")) settings.shrink = std::atoi(text) != 0;
  if (const char* const text = std::getenv("BONFIRE_JOBS")) settings.jobs = std::max(1, std::atoi(text));
  if (const char* const text = std::getenv("BONFIRE_SIMPLER")) {
    std::istringstream in(text);
    for (std::string step; std::getline(in, step, '.');) settings.simpler.push_back(std::atoi(step.c_str()));
  }
  return settings;
}

bool is_failure(const std::string& result) { return !result.empty() && !result.starts_with(no_case); }

std::string failure_text(const std::string& test, std::uint64_t seed, const std::vector<int>& way, const std::string& text,
                         const std::string& wrong) {
  const std::string simpler = way.empty() ? "" : fmt::format("BONFIRE_SIMPLER={} ", fmt::join(way, "."));
  return fmt::format(
      "seed {}: {}\n"
      "---- the smallest case found that fails:\n{}"
      "---- to repeat it: BONFIRE_SEED={} {}build/test_random --gtest_filter={}\n",
      seed, wrong, text, seed, simpler, test);
}

}  // namespace bonfire::cases
