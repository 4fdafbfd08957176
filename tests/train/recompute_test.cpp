// layout.recompute through the real loop: the same bits whatever the layout, and the collectives of the plan.
#include <gtest/gtest.h>

#include <algorithm>

#include <fmt/ranges.h>

#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::recompute_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides one, const Overrides& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

class Recompute : public Loop {
 protected:
  void expect_same_bits(const std::string& model, int ranks, const Overrides& layout) {
    const auto expected = run(model, ranks, layout);
    ASSERT_EQ(expected.error, "") << fmt::format("{}", fmt::join(layout, " "));
    for (const Overrides& how : {Overrides{"layout.recompute=full"}, Overrides{"layout.recompute=selective"},
                                 Overrides{"layout.recompute=full", "layout.recompute_every=2"}}) {
      if (model == "vgg" && how[0].ends_with("selective")) continue;
      const auto outcome = run(model, ranks, layout + how);
      SCOPED_TRACE(fmt::format("{}, {} ranks, {} {}", model, ranks, fmt::join(layout, " "), fmt::join(how, " ")));
      EXPECT_EQ(outcome.error, "");
      EXPECT_EQ(outcome.losses(), expected.losses());
      ASSERT_FALSE(outcome.metrics.empty());
      EXPECT_EQ(outcome.metrics.back().at("grad_norm"), expected.metrics.back().at("grad_norm"));
    }
  }
};

TEST_F(Recompute, EveryModelHasTheSameBits) {
  for (const char* model : {"llama", "gpt2", "mlp", "vgg"})
    for (const char* precision : {"fp32", "bf16"})
      expect_same_bits(model, 2, {"train.microbatch=12", std::string("train.precision=") + precision});
  expect_same_bits("gpt2", 1, {"model.dropout=0.1", "train.microbatch=12"});
}

// Magnitudes are counted once, and a product that is made again rounds by those that it had then.
TEST_F(Recompute, ProductsInEightBitsHaveTheSameBits) {
  const Overrides sizes = {"train.precision=fp8", "model.dim=32",   "model.ffn=64",      "model.layers=3",
                           "data.sequence=8",     "train.batch=16", "train.microbatch=4"};
  for (const char* model : {"llama", "gpt2"})
    for (const char* scaling : {"delayed", "current"})
      expect_same_bits(model, 1, sizes + Overrides{std::string("train.fp8_scaling=") + scaling});
  expect_same_bits("llama", 1, sizes + Overrides{"train.fp8_scales=row"});
  expect_same_bits("llama", 2, sizes + Overrides{"layout.shard=2"});
  expect_same_bits("gpt2", 2, sizes + Overrides{"layout.pipeline=2", "model.layers=4"});
}

TEST_F(Recompute, EveryShardingHasTheSameBits) {
  for (const Overrides& layout : {Overrides{"layout.shard=2"},
                                  {"layout.shard=2", "layout.reshard_after_forward=false"},
                                  {"layout.shard=2", "layout.sharded=gradients"},
                                  {"layout.shard=2", "layout.wrap=all"},
                                  {"layout.shard=2", "layout.offload=parameters"},
                                  {"layout.shard=2", "layout.prefetch=0"}})
    expect_same_bits("llama", 2, layout + Overrides{"train.microbatch=6"});
  expect_same_bits("gpt2", 2, {"layout.shard=2", "train.precision=bf16", "model.dropout=0.1"});
  expect_same_bits("gpt2", 4, {"layout.shard=2", "layout.replicate=2", "layout.reshard_after_forward=2"});
  // On a CPU there is nowhere to move inputs to.
  EXPECT_EQ(run("llama", 2, {"layout.shard=2", "layout.recompute=full", "layout.recompute_offload=true"}).losses(),
            run("llama", 2, {"layout.shard=2"}).losses());
}

TEST_F(Recompute, EveryScheduleHasTheSameBits) {
  const Overrides deep = {"layout.pipeline=2", "model.layers=4", "train.microbatch=12", "model.dropout=0.1"};
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"})
    expect_same_bits("gpt2", 2, deep + Overrides{std::string("layout.schedule=") + schedule});
  expect_same_bits("llama", 4, {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"});
  expect_same_bits("llama", 4,
                   {"layout.pipeline=2", "layout.shard=2", "layout.reshard_after_forward=true", "train.microbatch=6",
                    "train.precision=bf16"});
}

TEST_F(Recompute, SplitLayersHaveTheSameBits) {
  const Overrides both = {"model.heads=4", "train.microbatch=12"};
  for (const char* model : {"llama", "gpt2"}) {
    expect_same_bits(model, 2, both + Overrides{"layout.tensor=2"});
    expect_same_bits(model, 4, both + Overrides{"layout.tensor=4", "layout.sequence_parallel=false"});
  }
  expect_same_bits("gpt2", 2, both + Overrides{"layout.tensor=2", "model.dropout=0.1", "train.precision=bf16"});
  expect_same_bits(
      "llama", 8, {"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "train.microbatch=6", "layout.schedule=zb-h1"});
}

// Law 2.
TEST_F(Recompute, StepsHaveExactlyTheCollectivesOfThePlan) {
  struct Layout {
    int ranks;
    Overrides overrides;
  };
  for (const char* model : {"llama", "gpt2"})
    for (const auto& [ranks, layout] :
         {Layout{4, {"layout.shard=4", "train.microbatch=12"}},
          Layout{4, {"layout.tensor=2", "layout.replicate=2", "train.microbatch=12"}},
          Layout{4, {"layout.tensor=2", "layout.shard=2", "train.microbatch=12"}},
          Layout{4, {"layout.tensor=4", "layout.sequence_parallel=false", "train.microbatch=12"}},
          Layout{4, {"layout.tensor=2", "layout.shard=2", "train.freeze=[\"blocks.0\"]", "train.microbatch=12"}},
          Layout{4, {"layout.pipeline=2", "layout.shard=2", "train.microbatch=6"}},
          Layout{8, {"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "train.microbatch=6"}},
          Layout{8,
                 {"layout.pipeline=2", "layout.shard=2", "layout.tensor=2", "layout.sequence_parallel=false",
                  "layout.schedule=zb-h1", "train.microbatch=6"}}})
      for (const char* how : {"full", "selective"}) {
        SCOPED_TRACE(fmt::format("{} {} {}", model, fmt::join(layout, " "), how));
        const auto outcome =
            run(model, ranks,
                layout + testing::traced_step + Overrides{std::string("layout.recompute=") + how, "model.heads=4"});
        ASSERT_EQ(outcome.error, "");
        testing::expect_collectives_of_plan(outcome.folder, ranks);
      }
}

TEST_F(Recompute, TheMemoryIsWhatWasPredicted) {
  const std::map<std::string, Overrides> sizes = {
      {"llama", {"model.dim=64", "model.ffn=192", "model.layers=6", "model.vocab=256", "data.sequence=128"}},
      {"gpt2", {"model.dim=64", "model.layers=6", "model.vocab=256", "data.sequence=128"}},
      {"mlp", {"model.dim=256", "model.ffn=1024", "model.layers=6", "train.batch=960"}},
      {"vgg", {"model.image=32", "model.convolutions=[16, 16, 0, 32, 32, 0]", "model.pool=4", "model.ffn=256"}}};
  for (const auto& [model, size] : sizes)
    for (const char* how : {"full", "selective"}) {
      if (model == "vgg" && how == std::string("selective")) continue;
      for (const char* every : {"1", "3"}) {
        const auto report =
            run(model, 1,
                size + Overrides{std::string("layout.recompute=") + how, std::string("layout.recompute_every=") + every})
                .report;
        const auto predicted = static_cast<double>(report.predicted_memory_bytes);
        EXPECT_NEAR(predicted, static_cast<double>(report.peak_memory_bytes), 0.03 * predicted)
            << model << " " << how << " every " << every;
      }
    }
}

TEST_F(Recompute, WhatCannotBeIsRefused) {
  const auto refusal = [](const std::string& model, const Overrides& overrides, int ranks = 1) {
    return testing::thrown<ConfigError>([&] {
      // [data] has no `branching` beside files.
      std::string sections = models.at(model);
      const bool files = std::find(overrides.begin(), overrides.end(), "data.type=tokens") != overrides.end();
      if (const auto at = sections.find("branching"); files) sections.erase(at, sections.find('\n', at) - at);
      auto config = parse_config(sections + common, "a.toml", overrides);
      resolve(config, ranks);
    });
  };
  EXPECT_EQ(refusal("llama", {"layout.recompute=full", "train.keep_for_backward=activations"}),
            "--set layout.recompute=full: layout.recompute = \"full\": train.keep_for_backward = \"activations\" would be "
            "kept of what is made "
            "again; allowed with it: none | selective, or train.keep_for_backward = \"least\"");
  EXPECT_EQ(refusal("vgg", {"layout.recompute=selective"}),
            "--set layout.recompute=selective: layout.recompute = \"selective\": model.type = \"vgg\" has no activation "
            "between two products; allowed "
            "with it: none | full");
  testing::expect_part(refusal("llama", {"layout.recompute=selective", "layout.recompute_offload=true"}),
                       "has no meaning with layout.recompute = \"selective\"");
  testing::expect_part(refusal("llama", {"layout.recompute_every=2"}), "has no meaning with layout.recompute = \"none\"");
  testing::expect_part(refusal("llama", {"layout.recompute=full", "layout.recompute_every=0"}),
                       "layout.recompute_every = 0");
  testing::expect_part(refusal("llama", {"layout.recompute=selective", "adapter.rank=2", "checkpoint.every=0"}),
                       "layout.recompute = \"selective\": adapters keep what goes into the activation (adapter.rank = 2); "
                       "allowed with them: none | full");
  testing::expect_part(refusal("llama", {"layout.recompute=selective", "layout.context=2", "data.sequence=8"}, 2),
                       "attention over parts of a sample (layout.context, data.documents) does not make q, k and v again");
  testing::expect_part(refusal("llama", {"layout.recompute=selective", "data.documents=separate", "data.type=tokens",
                                         "data.paths=[\"a.bin\"]", "data.end_of_document=1"}),
                       "attention over parts of a sample (layout.context, data.documents) does not make q, k and v again");
  testing::expect_part(
      refusal("llama",
              {"layout.recompute=full", "layout.recompute_offload=true", "layout.pipeline=2", "train.microbatch=24"}, 2),
      "layout.recompute_offload = true: the host memory of a pipeline's microbatches is not predicted (layout.pipeline = "
      "2)");
  for (const char* how : {"full", "selective"})
    testing::expect_part(refusal("llama", {std::string("layout.recompute=") + how, "model.reversible=true"}),
                         "the blocks keep nothing for backward already (model.reversible = true); allowed with it: none");
}

}  // namespace
}  // namespace bonfire::recompute_test
