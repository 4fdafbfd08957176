#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

// Sharded training with real processes, as a person would run it.
namespace bonfire::sharding_test {
namespace {
using bonfire::testing::Scratch;

constexpr const char* tiny = R"([run]
name = "tiny"
device = "cpu"
[model]
dim = 16
layers = 3
heads = 2
vocab = 40
[data]
sequence = 6
branching = 4
[train]
steps = 4
batch = 12
[optimizer]
lr = 0.01
warmup = 1
)";

// The weights alone are 3.03 MiB, more than the cap: a rank could not even build the whole model.
constexpr const char* deep = R"([run]
name = "deep"
device = "cpu"
memory_cap = "2816KiB"
[model]
dim = 32
layers = 48
heads = 2
vocab = 64
ffn = 128
[data]
sequence = 2
branching = 4
[train]
steps = 3
batch = 4
[optimizer]
type = "sgd"
momentum = 0.0
lr = 0.1
warmup = 1
)";

std::vector<double> losses(const Scratch& scratch, const std::string& folder) {
  std::vector<double> values;
  std::istringstream in(scratch.read(folder + "/metrics.jsonl"));
  for (std::string line; std::getline(in, line);) values.push_back(nlohmann::json::parse(line).at("loss").get<double>());
  return values;
}

void expect_near(const std::vector<double>& seen, const std::vector<double>& expected, const std::string& what) {
  ASSERT_EQ(seen.size(), expected.size()) << what;
  for (std::size_t i = 0; i < seen.size(); ++i) EXPECT_NEAR(seen[i], expected[i], 1e-5 * expected[i]) << what;
}

bool contains(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST(Sharding, EveryWayHasTheLossesOfOneRank) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  ASSERT_EQ(scratch.bonfire("train a.toml --set run.name=one").code, 0);
  const auto expected = losses(scratch, "runs/one");
  ASSERT_EQ(expected.size(), 4u);
  struct Way {
    const char* name;
    const char* arguments;
    const char* line;  // how the run says it at its start
  };
  for (const auto& [name, arguments, line] :
       {Way{"optimizer", "--set layout.shard=2 --set layout.sharded=optimizer", "1 replica x shard 2 (optimizer)"},
        Way{"gradients", "--set layout.shard=3 --set layout.sharded=gradients --set train.microbatch=2",
            "1 replica x shard 3 (gradients)"},
        Way{"parameters", "--set layout.shard=4", "1 replica x shard 4 (parameters)"},
        Way{"hybrid", "--set layout.replicate=2 --set layout.shard=2 --set train.microbatch=1",
            "2 replicas x shard 2 (parameters)"}}) {
    const auto ended = scratch.bonfire(std::string("train a.toml --set run.name=") + name + " " + arguments);
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_TRUE(contains(ended.err, std::string("layout: ") + line + "; a rank holds ")) << ended.err;
    expect_near(losses(scratch, std::string("runs/") + name), expected, name);
  }
}

TEST(Sharding, BadLayoutsAreRefusedBeforeAnythingStarts) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  struct Bad {
    const char* arguments;
    const char* words;
  };
  for (const auto& [arguments, words] :
       {Bad{"--ranks 4 --set layout.shard=3", "axes whose product is 4"},
        Bad{"--set layout.shard=2 --set layout.sharded=none", "optimizer | gradients | parameters"},
        Bad{"--ranks 2 --set train.gradient_precision=fp64", "fp32 | bf16 | fp16"},
        Bad{"--set layout.shard=4 --set layout.reshard_after_forward=3", "a divisor of 4"}}) {
    const auto ended = scratch.bonfire(std::string("train a.toml ") + arguments);
    EXPECT_EQ(ended.code, 2) << ended.err;
    EXPECT_TRUE(contains(ended.err, words)) << ended.err;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  }
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "runs")) << "something was started";
}

TEST(Sharding, TrainsAModelThatDataParallelismCannotHold) {
  const Scratch scratch;
  scratch.write("a.toml", deep);
  ASSERT_EQ(scratch.bonfire("train a.toml --ranks 1 --set run.name=one --set run.memory_cap=0").code, 0);
  const auto expected = losses(scratch, "runs/one");

  const auto refused = scratch.bonfire("train a.toml --ranks 4");
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
  for (const char* words :
       {"run.memory_cap = \"2816KiB\"", "shard = 1", "bytes) on each rank", "shard = 4, sharded = \"parameters\" would fit"})
    EXPECT_TRUE(contains(refused.err, words)) << words << " is not in: " << refused.err;
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "runs/deep")) << "something was started";

  const auto trained = scratch.bonfire("train a.toml --set layout.shard=4 --json");
  ASSERT_EQ(trained.code, 0) << trained.err;
  expect_near(losses(scratch, "runs/deep"), expected, "shard 4 under the cap");
  const auto report = nlohmann::json::parse(trained.out);
  EXPECT_LE(report.at("peak_memory_bytes").get<std::int64_t>(), 2816 << 10);
}

TEST(Sharding, TheWholePeakIsPredicted) {
  const Scratch scratch;
  for (const char* model :
       {"type = \"llama\"\ndim = 64\nlayers = 3\nheads = 4\nffn = 192\nvocab = 512\n[data]\nsequence = 32",
        "type = \"gpt2\"\ndim = 64\nlayers = 3\nheads = 4\nvocab = 512\ntied = true\n[data]\nsequence = 32",
        "type = \"mlp\"\ndim = 192\nlayers = 4\ninputs = 128\nclasses = 32",
        "type = \"vgg\"\nimage = 16\nconvolutions = [16, 0, 32, 0]\npool = 2\nffn = 128\nclasses = 10"}) {
    scratch.write("a.toml", std::string("[run]\ndevice = \"cpu\"\n[model]\n") + model + "\n[train]\nmicrobatch = 4\n");
    for (const char* layout :
         {"--set train.batch=8 --set layout.shard=2 --set layout.sharded=optimizer",
          "--set train.batch=16 --set layout.shard=2 --set layout.sharded=gradients",
          "--set train.batch=8 --set layout.shard=2 --set layout.sharded=parameters",
          "--set train.batch=16 --set layout.shard=2 --set layout.replicate=2 --set layout.reshard_after_forward=false"}) {
      const auto ended = scratch.bonfire(std::string("bench step a.toml --steps 3 --json ") + layout);
      ASSERT_EQ(ended.code, 0) << ended.err;
      const auto report = nlohmann::json::parse(ended.out);
      const double measured = report.at("peak_memory_bytes").get<double>();
      EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, 0.05 * measured) << model << layout;
    }
  }
}

// Where the first backward teaches another order, parameters move between buffers.
TEST(Sharding, ThePeakOfAnyWrappingIsPredicted) {
  const Scratch scratch;
  for (const char* wrapped : {R"(["embedding", "head"])", R"(["block"])"})
    for (const char* sharded : {"\"optimizer\"", "\"gradients\"", "\"gradients\"\naccumulation = \"full\""}) {
      scratch.write("a.toml",
                    fmt::format("[run]\ndevice = \"cpu\"\n[model]\ntype = \"llama\"\ndim = 64\nlayers = 3\nheads = 4\n"
                                "ffn = 192\nvocab = 512\n[data]\nsequence = 32\n[train]\nmicrobatch = 4\nbatch = 16\n"
                                "[layout]\nshard = 2\nsharded = {}\nwrap_types = {}\n",
                                sharded, wrapped));
      const auto ended = scratch.bonfire("bench step a.toml --steps 3 --json");
      ASSERT_EQ(ended.code, 0) << ended.err;
      const auto report = nlohmann::json::parse(ended.out);
      const double measured = report.at("peak_memory_bytes").get<double>();
      EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, 0.05 * measured)
          << sharded << ", " << wrapped;
    }
  // With few activations moving them is the peak.
  scratch.write(
      "a.toml",
      "[run]\ndevice = \"cpu\"\n[model]\ntype = \"gpt2\"\ndim = 256\nlayers = 5\nheads = 8\nffn = 280\nvocab = 4096\n"
      "[data]\nsequence = 48\n[train]\nmicrobatch = 1\nbatch = 2\nfreeze = [\"embedding\"]\n"
      "[layout]\nshard = 2\nwrap_types = [\"block\"]\n");
  for (const char* how : {"optimizer", "gradients"})
    for (const char* precision : {"fp32", "bf16"}) {
      const auto ended = scratch.bonfire(fmt::format(
          "bench step a.toml --steps 2 --json --set layout.sharded={} --set train.precision={}", how, precision));
      ASSERT_EQ(ended.code, 0) << ended.err;
      const auto report = nlohmann::json::parse(ended.out);
      const double measured = report.at("peak_memory_bytes").get<double>();
      EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, 0.01 * measured) << how << ", " << precision;
    }
}

TEST(Sharding, BenchStepTakesEveryLayout) {
  const Scratch scratch;
  scratch.write("a.toml", tiny);
  for (const char* arguments : {"--set layout.shard=2", "--set layout.shard=2 --set layout.sharded=optimizer",
                                "--set layout.shard=2 --set layout.replicate=2"}) {
    const auto ended = scratch.bonfire(std::string("bench step a.toml --steps 3 --json ") + arguments);
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_TRUE(contains(ended.err, " predicted, ")) << ended.err;
    EXPECT_TRUE(contains(ended.err, " measured at the peak")) << ended.err;
    const auto report = nlohmann::json::parse(ended.out);
    for (const char* key : {"tokens_per_second", "step_ms", "peak_memory_bytes", "predicted_memory_bytes"})
      EXPECT_GT(report.at(key).get<double>(), 0) << key;
    // Of the median step, as the summary says.
    EXPECT_NEAR(report.at("tokens_per_second").get<double>() * report.at("step_ms").get<double>() * 1e-3, 12 * 6, 1e-6);
    EXPECT_EQ(report.at("steps"), 3 + 1) << "one sets the run up";
  }
}

}  // namespace
}  // namespace bonfire::sharding_test
