#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/collective.h"
#include "bonfire/plan/layout.h"

// Two lists of a step's collectives, each as "kind bytes". In the order of the alphabet: two tracks of one rank may begin in
// the same nanosecond, and the order is another test's.
namespace bonfire::testing {

inline std::vector<std::string> planned_collectives(const plan::ModelDescription& model, const plan::DataParallel& layout) {
  std::vector<std::string> all;
  for (const auto& collective : plan::collectives_of_step(model, layout))
    all.push_back(fmt::format("{} {}", name_of(collective.kind), collective.bytes));
  std::sort(all.begin(), all.end());
  return all;
}

// Those of rank 1, by the trace of a run that traced one step.
inline std::vector<std::string> traced_collectives(const std::filesystem::path& run_folder) {
  std::vector<std::string> all;
  const auto trace = nlohmann::json::parse(std::ifstream(run_folder / "trace.json"));
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || event.at("cat") != "communication" || event.at("pid") != 1) continue;
    all.push_back(
        fmt::format("{} {}", event.at("name").get<std::string>(), event.at("args").at("bytes").get<std::int64_t>()));
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace bonfire::testing
