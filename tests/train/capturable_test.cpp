#include "bonfire/train/capturable.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/train/build.h"

namespace bonfire::capturable_test {
namespace {

Config config_of(const std::vector<std::string>& overrides, std::int64_t ranks = 1) {
  Config config =
      parse_config("[model]\ntype = \"gpt2\"\ndim = 16\nlayers = 2\nheads = 2\nvocab = 40\n", "a.toml", overrides);
  resolve(config, ranks);
  return config;
}

std::string error_of(const std::vector<std::string>& overrides, std::int64_t ranks = 1) {
  try {
    device_of(config_of(overrides, ranks), 0);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

const c10::Device gpu(c10::kCUDA, 0);

TEST(Capturable, OnlyStepsOfAGpuAre) {
  for (const char* word : {"auto", "off"}) {
    const auto config = config_of({std::string("train.graphs=") + word, "run.device=cpu"});
    EXPECT_FALSE(wants_graphs(config, c10::kCPU));
    EXPECT_EQ(wants_graphs(config, gpu), std::string(word) == "auto");
    EXPECT_EQ(device_of(config, 0), c10::Device(c10::kCPU));
  }
  EXPECT_EQ(error_of({"train.graphs=on", "run.device=cpu"}),
            "--set train.graphs=on: train.graphs = \"on\": the device is a CPU; allowed there: auto | off");
  EXPECT_TRUE(wants_graphs(config_of({"train.graphs=on"}), gpu));
}

// One step that sets the run up; on a GPU another, in which products that add to gradients are tried; and, where steps are
// captured, one more and the one with the capture.
TEST(Capturable, ARunSettlesWhenItHasCaptured) {
  EXPECT_EQ(steps_to_settle(config_of({}), c10::kCPU), 1);
  EXPECT_EQ(steps_to_settle(config_of({}), gpu), 4);
  EXPECT_EQ(steps_to_settle(config_of({"train.graphs=off"}), gpu), 2);
  EXPECT_EQ(steps_to_settle(config_of({"model.dropout=0.5"}), gpu), 2);
}

// What the host decides anew in each step is named where capturing is asked for, and hinders it where it is not.
TEST(Capturable, WhatTheHostDecidesHinders) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> hindrances = {
      {{"train.precision=fp16"}, "train.precision = \"fp16\""},
      {{"model.dropout=0.5"}, "model.dropout = 0.5"},
      {{"adapter.rank=2", "adapter.dropout=0.25", "checkpoint.every=0"}, "adapter.dropout = 0.25"},
      {{"layout.offload=optimizer"}, "layout.offload = \"optimizer\""},
      {{"layout.compression=powersgd"}, "layout.compression = \"powersgd\""},
      {{"layout.negotiate_order=true"}, "layout.negotiate_order = true"},
      {{"run.debug_collectives=true"}, "run.debug_collectives = true"},
      {{"fault.nan_step=2"}, "fault.nan_step = 2"}};
  for (auto [overrides, words] : hindrances) {
    EXPECT_EQ(hindrance_to_graphs(config_of(overrides)).find(words), 0u) << words;
    EXPECT_FALSE(wants_graphs(config_of(overrides), gpu)) << words;
    overrides.push_back("train.graphs=on");
    EXPECT_NE(error_of(overrides).find("train.graphs = \"on\": does not go with " + words), std::string::npos)
        << error_of(overrides);
  }
  const std::vector<std::string> staged{"layout.pipeline=2", "train.batch=8", "train.microbatch=2"};
  EXPECT_EQ(hindrance_to_graphs(config_of(staged, 2)), "layout.pipeline = 2: the host runs the schedule");
  EXPECT_EQ(hindrance_to_graphs(config_of({"layout.tensor=2"}, 2)),
            "layout.tensor = 2: what ranks exchange inside of layers");
  EXPECT_EQ(hindrance_to_graphs(config_of({"train.precision=fp8"})), "");
  EXPECT_EQ(hindrance_to_graphs(config_of({"train.precision=bf16"})), "");
  EXPECT_EQ(hindrance_to_graphs(config_of({"adapter.rank=2", "checkpoint.every=0"})), "");
  // The host need not know what a step came to because of these.
  for (const char* word : {"model.dropout=0.5", "layout.negotiate_order=true", "run.debug_collectives=true"})
    EXPECT_EQ(hindrance_to_device_steps(config_of({word})), "") << word;
  EXPECT_EQ(hindrance_to_device_steps(config_of({"train.precision=fp16"})),
            "train.precision = \"fp16\": the host decides on the scale of the loss");
}

}  // namespace
}  // namespace bonfire::capturable_test
