#include "bonfire/train/build.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/train/whole_model.h"
#include "tests/support/ranks.h"

namespace bonfire::build_test {
namespace {

TEST(Build, RefusesBf16OnAGpuWithoutIt) {
  const Config bf16 = parse_config("[train]\nprecision = \"bf16\"\n", "a.toml");
  const GpuInfo old_gpu{.name = "Tesla V100", .memory_bytes = 0, .major = 7, .minor = 0};
  try {
    require_precision(bf16, old_gpu);
    FAIL();
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    for (const char* words :
         {"a.toml:2", "train.precision = \"bf16\"", "Tesla V100 has compute capability 7.0", "allowed on it: fp32 | fp16"})
      EXPECT_NE(message.find(words), std::string::npos) << message;
  }
  require_precision(bf16, {.name = "H200", .memory_bytes = 0, .major = 9, .minor = 0});
  require_precision(parse_config("[train]\nprecision = \"fp16\"\n", "a.toml"), old_gpu);
}

constexpr const char* tiny =
    "[run]\ndevice = \"cpu\"\n[model]\ntype = \"gpt2\"\ndim = 16\nlayers = 2\nheads = 2\nvocab = 40\n[data]\nsequence = "
    "6\nbranching = 4\n[train]\nbatch = 4\n[layout]\nshard = 2\n";

Config config_of(const std::vector<std::string>& overrides) {
  Config config = parse_config(tiny, "a.toml", overrides);
  resolve(config, 2);
  return config;
}

TEST(Build, EveryOptionReachesTheEngine) {
  const auto plain = config_of({});
  const auto all = config_of({"run.debug_parameters=true", "train.output_precision=bf16", "train.buffer_precision=fp16",
                              "train.start=broadcast", "layout.ignore=[\"head\"]", "layout.negotiate_order=true"});
  testing::run_ranks(2, [&](World& world) {
    {
      const bonfire::Run run(world, plain);
      const auto& options = run.whole().engine.options();
      EXPECT_FALSE(options.debug || options.negotiate_order || options.precision.outputs || options.precision.buffers);
      EXPECT_EQ(options.start, Start::check);
      EXPECT_TRUE(options.wrapping.ignored_parameters.empty());
    }
    const bonfire::Run run(world, all);
    const auto& options = run.whole().engine.options();
    EXPECT_TRUE(options.debug && options.negotiate_order);
    EXPECT_EQ(options.precision.outputs, at::kBFloat16);
    EXPECT_EQ(options.precision.buffers, at::kHalf);
    EXPECT_EQ(options.start, Start::broadcast);
    EXPECT_EQ(options.wrapping.ignored_parameters,
              (std::vector<std::string>{"head.norm.weight", "head.norm.bias", "head.output.weight"}));
  });
}

// With train.start = "broadcast" every weight comes from rank 0; without it none travels.
TEST(Build, FirstWeightsAreRankZeros) {
  for (const char* sharded : {"optimizer", "parameters"})
    for (const char* start : {"check", "broadcast"}) {
      const auto config = config_of({std::string("train.start=") + start, std::string("layout.sharded=") + sharded});
      testing::run_ranks(2, [&](World& world) {
        world.recorder().start();
        const bonfire::Run run(world, config);
        world.recorder().stop();
        std::int64_t bytes = 0;
        for (const auto& one : world.recorder().collectives())
          if (one.kind == CollectiveKind::broadcast) bytes += one.bytes;
        const auto whole = plan::describe(config.model.spec).parameter_elements() * 4;
        EXPECT_EQ(bytes, std::string(start) == "broadcast" ? whole : 0) << sharded;
      });
    }
}

}  // namespace
}  // namespace bonfire::build_test
