#include "bonfire/train/memory_need.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/train/predict.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::memory_need_test {
namespace {
using testing::Loop;
using testing::thrown;

// Deep enough that a few Units are little beside all of them.
constexpr const char* deep =
    "[model]\ndim = 64\nlayers = 24\nheads = 2\nvocab = 64\nffn = 256\n[data]\nsequence = 8\nbranching = 4\n[train]\nbatch "
    "= "
    "4\n";

Config config_of(std::int64_t ranks, const std::vector<std::string>& overrides) {
  Config config = parse_config(deep, "a.toml", overrides);
  resolve(config, ranks);
  return config;
}

TEST(MemoryNeed, TheCapIsComparedWithThePrediction) {
  const auto needed = predict_memory(config_of(4, {})).total();
  EXPECT_NO_THROW(require_memory(config_of(4, {})));
  EXPECT_NO_THROW(require_memory(config_of(4, {fmt::format("run.memory_cap={}", needed)})));
  const auto tight = config_of(4, {fmt::format("run.memory_cap={}", needed - 1)});
  EXPECT_THROW(require_memory(tight), ConfigError);
  const auto error = thrown<Error>([&] { require_memory(tight); });
  for (const std::string& words : {std::string("--set run.memory_cap="), fmt::format("({} bytes)", needed),
                                   std::string("shard = 2, sharded = \"optimizer\" would fit")})
    EXPECT_NE(error.find(words), std::string::npos) << words << " is not in: " << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
  // Where what is asked for is sharded already, but not enough.
  const auto half = thrown<Error>([] {
    require_memory(config_of(4, {"layout.shard=2", "layout.replicate=2", "checkpoint.every=0", "run.memory_cap=12MiB"}));
  });
  EXPECT_NE(half.find("shard = 4, sharded = \"parameters\" would fit"), std::string::npos) << half;
}

TEST(MemoryNeed, ALayoutIsOneLine) {
  EXPECT_EQ(layout_line(config_of(4, {})).find("4 replicas, nothing sharded; a rank holds "), 0u);
  EXPECT_EQ(layout_line(config_of(4, {"layout.replicate=2", "layout.shard=2", "layout.sharded=gradients"}))
                .find("2 replicas x shard 2 (gradients); a rank holds "),
            0u);
}

// The prediction is asked before a run starts; what it has missed, the allocator catches.
TEST_F(Loop, AnAllocationThatIsRefusedSaysWhatIsNeeded) {
  const auto outcome = run("llama", 1, {"run.memory_cap=100KiB"});
  for (const char* words :
       {"out of memory: ", "would exceed the limit of 100.00 KiB", "was predicted to need", "bytes) on each rank"})
    EXPECT_NE(outcome.error.find(words), std::string::npos) << words << " is not in: " << outcome.error;
  EXPECT_EQ(outcome.error.find('\n'), std::string::npos);
  EXPECT_EQ(run("llama", 1, {"run.memory_cap=100MiB"}).metrics.size(), 4u);
  EXPECT_EQ(run("llama", 1).metrics.size(), 4u) << "the cap ends with its run";

  const auto advice = thrown<Error>([] { fail_for_memory(config_of(4, {}), "1 B too many"); });
  EXPECT_NE(advice.find("out of memory: 1 B too many; layout.shard = 1"), std::string::npos) << advice;
  EXPECT_NE(advice.find("layout.shard = 2 with layout.sharded = \"optimizer\" would need less"), std::string::npos)
      << advice;
}

// What an allocator has refused under a cap ends with a factor that is thought to fit it, not only to need less.
TEST(MemoryNeed, AFactorThatFitsTheCapIsNamed) {
  const auto peak = [](const char* shard, const char* replicate) {
    return predict_memory(config_of(4, {shard, replicate})).total();
  };
  const auto whole = predict_memory(config_of(4, {})).total();
  const auto half = peak("layout.shard=2", "layout.replicate=2"), quarter = peak("layout.shard=4", "layout.replicate=1");
  ASSERT_LT(quarter, half);
  const auto advice = [&](std::int64_t cap) {
    return thrown<Error>([&] { fail_for_memory(config_of(4, {fmt::format("run.memory_cap={}", cap)}), "1 B too many"); });
  };
  const auto fits = [](const char* shard) {
    return fmt::format("layout.shard = {} with layout.sharded = \"parameters\" would fit: ", shard);
  };
  EXPECT_NE(advice(half).find(fits("2")), std::string::npos) << advice(half);
  EXPECT_NE(advice(half - 1).find(fits("4")), std::string::npos) << advice(half - 1);
  EXPECT_NE(advice(quarter - 1).find("; use a smaller train.microbatch, or more ranks"), std::string::npos);
  // The prediction was under the cap, and wrong: the layout that was refused is no advice.
  EXPECT_NE(advice(2 * whole).find("layout.shard = 2 with layout.sharded = \"optimizer\" would fit: "), std::string::npos)
      << advice(2 * whole);
}

}  // namespace
}  // namespace bonfire::memory_need_test
