// The real loop through pipelines, against one rank.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/schedule/generate.h"
#include "bonfire/train/staged_model.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::pipeline_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;

using Overrides = std::vector<std::string>;

class Pipelines : public Loop {};

TEST_F(Pipelines, EveryScheduleHasTheCurveOfOneRank) {
  for (const auto& name : schedule::schedule_names()) {
    SCOPED_TRACE(name);
    expect_like_one_rank("gpt2", 2, {"layout.pipeline=2", "layout.schedule=" + name, "train.microbatch=6"});
  }
}

TEST_F(Pipelines, WithEveryShardingAndModel) {
  for (const auto& [model, sections] : models) {
    SCOPED_TRACE(model);
    expect_like_one_rank(model, 4, {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"});
  }
  // Unit by Unit.
  for (const auto* prefetch : {"before", "after"})
    expect_like_one_rank("llama", 4,
                         {"layout.pipeline=2", "layout.shard=2", "layout.reshard_after_forward=true",
                          std::string("layout.backward_prefetch=") + prefetch, "train.microbatch=6"});
  for (const auto* what : {"optimizer", "gradients"})
    expect_like_one_rank("gpt2", 4,
                         {"layout.pipeline=2", "layout.shard=2", std::string("layout.sharded=") + what,
                          "layout.schedule=zb-h1", "train.microbatch=6"});
  expect_like_one_rank("llama", 4,
                       {"layout.pipeline=2", "layout.replicate=2", "layout.schedule=zb-v", "train.microbatch=12"});
}

TEST_F(Pipelines, FrozenPartsAndDropoutToo) {
  expect_like_one_rank("gpt2", 2, {"layout.pipeline=2", "layout.schedule=zb-h1", "train.microbatch=12"},
                       {"train.freeze=[\"embedding\", \"blocks.*.attention\"]", "model.dropout=0.1"});
}

TEST_F(Pipelines, StagesAsTold) {
  expect_like_one_rank("gpt2", 2, {"layout.pipeline=2", "layout.stages=[1, 3]", "train.microbatch=12"});
}

// Whatever was measured, all ranks cut alike, and the run folder says how.
TEST_F(Pipelines, StagesAsMeasured) {
  expect_like_one_rank("gpt2", 2, {"layout.pipeline=2", "layout.stages=measured", "train.microbatch=12"});
  const auto outcome = run("gpt2", 2, {"layout.pipeline=2", "layout.stages=measured", "train.microbatch=12"});
  Config config = load_config(outcome.folder / "config.toml");
  resolve(config, 2);
  const auto counts = std::get<std::vector<std::int64_t>>(config.layout.stages);
  ASSERT_EQ(counts.size(), 2u);
  EXPECT_EQ(counts[0] + counts[1], 4);
}

// The picture of a real run is that of the table: the cells of each rank, as they ran, are the computations of its row, in
// their order and one behind the other, and none begins before what it needs has ended on another rank.
class Traces : public Pipelines, public ::testing::WithParamInterface<std::pair<const char*, int>> {};

TEST_P(Traces, AreTheTable) {
  const auto& [name, ranks] = GetParam();
  const Overrides layout{fmt::format("layout.pipeline={}", ranks), fmt::format("layout.schedule={}", name),
                         "train.microbatch=6", "train.trace_steps=1"};
  const auto outcome = run("gpt2", ranks, layout);
  Config config = parse_config(models.at("gpt2") + common, "a.toml", layout);
  resolve(config, ranks);
  const auto table = table_of(config);

  std::ifstream in(outcome.folder / "trace.json");
  const auto trace = nlohmann::json::parse(in);
  struct Span {
    double begin = 0, end = 0;
  };
  std::map<int, std::vector<std::pair<double, std::string>>> cells;
  std::map<std::string, Span> spans;
  constexpr double rounding = 0.01;  // the file has microseconds
  for (const auto& event : trace.is_array() ? trace : trace.at("traceEvents"))
    if (const auto name = event.at("name").get<std::string>(); event.contains("ts") && schedule::parse_action(name)) {
      const double begin = event.at("ts").get<double>();
      cells[event.at("pid").get<int>()].emplace_back(begin, name);
      spans[name] = {begin, begin + event.at("dur").get<double>()};
    }
  for (int rank = 0; rank < ranks; ++rank) {
    std::stable_sort(cells[rank].begin(), cells[rank].end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> seen, expected;
    for (const auto& [at, name] : cells[rank]) seen.push_back(name);
    for (const auto& action : table.rows[static_cast<std::size_t>(rank)])
      if (schedule::is_compute(action.kind)) expected.push_back(schedule::to_text(action));
    EXPECT_EQ(seen, expected) << "rank " << rank;
    for (std::size_t at = 1; at < seen.size(); ++at)
      EXPECT_LE(spans.at(seen[at - 1]).end, cells[rank][at].first + rounding) << seen[at];
  }
  for (const auto& [text, span] : spans) {
    const auto action = *schedule::parse_action(text);
    auto before = action;
    if (action.kind == schedule::Kind::forward && action.stage > 0)
      --before.stage;
    else if (schedule::makes_input_gradient(action.kind) && action.stage + 1 < table.stages)
      ++before.stage;
    else
      continue;
    EXPECT_LE(spans.at(schedule::to_text(before)).end, span.begin + rounding) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Traces,
                         ::testing::Values(std::pair("zb-h1", 2), std::pair("1f1b", 4), std::pair("interleaved", 2)),
                         [](const auto& info) {
                           return fmt::format("{}_ranks", info.param.second) + std::to_string(info.index);
                         });

std::string refusal(const Overrides& overrides, std::int64_t ranks) {
  try {
    Config config = parse_config(models.at("gpt2") + common, "a.toml", overrides);
    resolve(config, ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(PipelineKeys, WhatCannotBeIsOneLineBeforeAnythingStarts) {
  EXPECT_EQ(
      refusal({"layout.pipeline=8"}, 8),
      "--set layout.pipeline=8: layout.pipeline = 8: 8 stages for a model of 4 Units: a stage has at least one; allowed: "
      "up to 4 stages (pipeline x chunks)");
  const auto odd = refusal({"layout.pipeline=2", "layout.schedule=interleaved", "train.microbatch=16"}, 2);
  EXPECT_NE(odd.find("layout.schedule = \"interleaved\": "), std::string::npos) << odd;
  EXPECT_NE(odd.find("multiple"), std::string::npos) << odd;
  EXPECT_EQ(refusal({"layout.pipeline=2", "layout.schedule=2f2b"}, 2),
            "--set layout.schedule=2f2b: layout.schedule = \"2f2b\": no schedule has this name, and there is no such file; "
            "allowed: "
            "naive | gpipe | 1f1b | interleaved | zb-h1 | zb-h2 | zb-v | pipedream | pipedream-vertical | pipedream-2bw | "
            "pipedream-flush | a file");
  EXPECT_NE(refusal({"layout.schedule=gpipe"}, 1).find("there is no pipeline"), std::string::npos);
  EXPECT_NE(refusal({"layout.stages=measured"}, 1).find("layout.stages = \"measured\": there is no pipeline"),
            std::string::npos);
  EXPECT_EQ(refusal({"layout.pipeline=2", "layout.stages=[1, 2]"}, 2),
            "--set layout.stages=[1, 2]: layout.stages = [1, 2]: stages of 1, 2 Units are 3 together; the model has 4");
  EXPECT_EQ(refusal({"layout.pipeline=2", "layout.stages=[1, 2, 1]"}, 2),
            "--set layout.stages=[1, 2, 1]: layout.stages = [1, 2, 1]: 3 stages are given, the schedule has 2 (pipeline x "
            "chunks)");
  EXPECT_NE(refusal({"layout.pipeline=2", "layout.stages=[0, 4]"}, 2).find("too small"), std::string::npos);
  EXPECT_NE(refusal({"layout.pipeline=2", "layout.stages=even"}, 2).find("allowed: count | measured | a list of integers"),
            std::string::npos)
      << refusal({"layout.pipeline=2", "layout.stages=even"}, 2);
  EXPECT_NE(refusal({"layout.pipeline=2", "layout.shard=2", "layout.sharded=parameters", "layout.negotiate_order=true"}, 4)
                .find("there is nothing to agree on; allowed: false, or layout.pipeline = 1"),
            std::string::npos);
  EXPECT_NE(refusal({"layout.pipeline=2", "layout.wrap=all"}, 2).find("allowed with: layout.pipeline = 1"),
            std::string::npos);
  const Overrides sharded{"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"};
  const auto with = [&](Overrides more) {
    more.insert(more.begin(), sharded.begin(), sharded.end());
    return refusal(more, 4);
  };
  EXPECT_NE(with({"layout.backward_prefetch=after"}).find("allowed with: layout.reshard_after_forward = true and"),
            std::string::npos);
  EXPECT_EQ(with({"layout.backward_prefetch=after", "layout.reshard_after_forward=true", "model.tied=false"}), "");
  EXPECT_NE(with({"layout.reshard_after_forward=true", "model.tied=true"}).find("(model.tied = true) is only predicted"),
            std::string::npos);
  EXPECT_NE(with({"run.debug_parameters=true"}).find("run.debug_parameters = true: all parameters of a stage are there"),
            std::string::npos);
  EXPECT_EQ(with({"run.debug_parameters=true", "layout.reshard_after_forward=true", "model.tied=false"}), "");
  EXPECT_NE(with({"layout.negotiate_order=true", "layout.reshard_after_forward=true", "model.tied=false"})
                .find("nothing to agree on"),
            std::string::npos);
}

}  // namespace
}  // namespace bonfire::pipeline_test
