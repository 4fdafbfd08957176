#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/collective.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/train/build.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/step.h"

// Two lists of a step's collectives, each as "kind axis bytes". In the order of the alphabet: two tracks of one rank may
// begin in the same nanosecond, and the order is another test's.
namespace bonfire::testing {

inline std::vector<std::string> lines_of(const std::vector<Collective>& list) {
  std::vector<std::string> all;
  for (const auto& one : list) all.push_back(fmt::format("{} {} {}", name_of(one.kind), name_of(one.axis), one.bytes));
  std::sort(all.begin(), all.end());
  return all;
}

inline std::vector<std::string> planned_collectives(const plan::ModelDescription& model, const plan::DataParallel& layout) {
  return lines_of(plan::collectives_of_step(model, layout));
}

// Those of a rank. REQUIRES: config is resolved, and its schedule has flushes.
inline std::vector<std::string> planned_collectives(const Config& config, int rank) {
  const auto& layout = config.layout;
  const int part = rank % static_cast<int>(layout.tensor);  // ranks along tensor are neighbours
  if (layout.pipeline == 1) return planned_collectives(wrapped_model_of(config, part), data_parallel_of(config));
  const int ranks_of_a_stage = static_cast<int>(layout.replicate * layout.shard * layout.context * layout.tensor);
  return lines_of(plan::collectives_of_step(model_of(config, part), pipeline_layout_of(config), rank / ranks_of_a_stage));
}

// Those of each of the first ranks, by the trace of a run that traced one step. The name of a track is where a collective
// ran, and its group, which begins with the axis; weights that stages of a pipeline have in common are its ranks'.
inline std::map<int, std::vector<std::string>> traced_collectives_of_ranks(const std::filesystem::path& run_folder) {
  const auto trace = nlohmann::json::parse(std::ifstream(run_folder / "trace.json"));
  std::map<std::pair<int, int>, std::string> axes;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("name") != "thread_name") continue;
    const auto track = event.at("args").at("name").get<std::string>();
    const auto group = track.substr(track.find(' ') + 1);
    axes[{event.at("pid"), event.at("tid")}] =
        group.starts_with("tied weights") ? name_of(Axis::pipeline) : group.substr(0, group.find(' '));
  }
  std::map<int, std::vector<std::string>> all;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X" || event.at("cat") != "communication") continue;
    all[event.at("pid")].push_back(fmt::format("{} {} {}", event.at("name").get<std::string>(),
                                               axes.at({event.at("pid"), event.at("tid")}),
                                               event.at("args").at("bytes").get<std::int64_t>()));
  }
  for (auto& [rank, lines] : all) std::sort(lines.begin(), lines.end());
  return all;
}

inline std::vector<std::string> traced_collectives(const std::filesystem::path& run_folder, int rank = 1) {
  return traced_collectives_of_ranks(run_folder)[rank];
}

// The same lines, each once with how often it is there: short enough to see what differs.
inline std::map<std::string, int> counted(const std::vector<std::string>& lines) {
  std::map<std::string, int> counts;
  for (const auto& line : lines) ++counts[line];
  return counts;
}

// Law 2, of a run in this folder that traced one step: each rank did what the plan lists for it.
inline void expect_collectives_of_plan(const std::filesystem::path& run_folder, int ranks) {
  Config config = load_config(run_folder / "config.toml");
  resolve(config, ranks);
  const auto traced = traced_collectives_of_ranks(run_folder);
  EXPECT_EQ(traced.size(), static_cast<std::size_t>(std::min(ranks, ranks_in_a_trace)));
  for (const auto& [rank, lines] : traced)
    EXPECT_EQ(counted(lines), counted(planned_collectives(config, rank))) << "rank " << rank;
}

// What a run is told, so that it traces one step that is like all that follow.
inline const std::vector<std::string> traced_step{"train.trace_from=3", "train.trace_steps=1"};

// Those of a step of this rank that is like all that follow, by its recorder. Collective.
inline std::vector<std::string> recorded_collectives(const World& world, const Config& config) {
  bonfire::Run run(world, config);
  Tracer tracer(world, config, "");
  constexpr std::int64_t settled = 3;
  for (std::int64_t step = 1; step <= settled; ++step) {
    const auto batches = *run.loader.next();
    if (step == settled) {
      world.recorder().clear();
      world.recorder().start();
    }
    auto taken = take_step(run, batches, step, tracer);
    read(run, taken);
  }
  world.recorder().stop();
  return lines_of(world.recorder().collectives());
}

}  // namespace bonfire::testing
