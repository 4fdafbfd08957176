// The real loop with ranks that share samples, and with documents that keep to themselves, against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/random.h"
#include "bonfire/data/token_writer.h"
#include "bonfire/train/capturable.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::context_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;
using testing::Outcome;

using Overrides = std::vector<std::string>;

Overrides operator+(Overrides one, const Overrides& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

// A sequence that four ranks and two that split it further can divide; heads that four ranks can exchange.
Overrides shape_of(const std::string& model) {
  Overrides shape{"data.sequence=16", "model.heads=4"};
  if (model == "llama") shape.push_back("model.kv_heads=4");
  return shape;
}

class Context : public Loop {
 protected:
  // Documents of one token and more, in both formats.
  Overrides with_documents(TokenFormat format) {
    const std::string path = (scratch_.path() / (format == TokenFormat::llmc ? "llmc.bin" : "megatron.bin")).string();
    TokenWriter writer({.path = path, .format = format, .vocab = 40});
    const Random random(1);
    std::uint64_t next = 0;
    for (std::uint64_t document = 0; document < 500; ++document) {
      for (std::uint64_t length = random.below(next++, 20); length > 0; --length)
        writer.append(std::vector<std::int64_t>{static_cast<std::int64_t>(random.below(next++, 39))});
      writer.append(std::vector<std::int64_t>{39});
      writer.end_document();
    }
    writer.finish();
    Overrides all{"data.type=tokens", "data.paths=['" + path + "']", "data.documents=separate", "train.batch=24"};
    if (format == TokenFormat::llmc) all.push_back("data.end_of_document=39");
    return all;
  }

  // [data] has no `branching` beside files.
  Outcome run_model(const std::string& model, int ranks, const Overrides& overrides) {
    std::string sections = models.at(model);
    const bool files = std::find(overrides.begin(), overrides.end(), "data.type=tokens") != overrides.end();
    if (const auto at = sections.find("branching"); files && at != std::string::npos)
      sections.erase(at, sections.find('\n', at) - at);
    return run_text(sections, ranks, overrides + shape_of(model));
  }

  void expect_collectives_of_plan(const std::string& model, int ranks, const Overrides& layout) {
    SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout, " ")));
    const auto outcome = run_model(model, ranks, layout + testing::traced_step);
    ASSERT_EQ(outcome.error, "");
    testing::expect_collectives_of_plan(outcome.folder, ranks);
  }

  void expect_same(const Outcome& outcome, const Outcome& expected) {
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(expected.error, "");
    ASSERT_EQ(outcome.metrics.size(), expected.metrics.size());
    for (std::size_t step = 0; step < expected.metrics.size(); ++step)
      for (const auto* key : {"loss", "grad_norm", "eval_loss"}) {
        if (!expected.metrics[step].contains(key)) continue;
        const auto value = expected.metrics[step].at(key).get<double>();
        EXPECT_NEAR(outcome.metrics[step].at(key).get<double>(), value, 1e-5 * std::abs(value))
            << key << ", step " << step + 1;
      }
  }

  void expect_like_one_rank(const std::string& model, const std::vector<std::pair<int, Overrides>>& layouts,
                            const Overrides& both = {}) {
    const Overrides alone = both + Overrides{"train.eval_every=2"};
    const auto expected = run_model(model, 1, alone);
    for (const auto& [ranks, layout] : layouts) {
      SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout + both, " ")));
      expect_same(run_model(model, ranks, layout + alone), expected);
    }
  }
};

TEST_F(Context, RanksHaveTheCurveOfOne) {
  for (const char* model : {"llama", "gpt2"})
    expect_like_one_rank(model, {{2, {"layout.context=2"}},
                                 {2, {"layout.context=2", "layout.context_attention=heads", "train.microbatch=12"}},
                                 {4, {"layout.context=4", "train.microbatch=12"}},
                                 {4, {"layout.context=4", "layout.context_attention=heads"}},
                                 {4, {"layout.context=2", "layout.shard=2", "train.microbatch=6"}}});
  expect_like_one_rank("gpt2",
                       {{4, {"layout.context=2", "layout.replicate=2"}}, {4, {"layout.context=2", "layout.tensor=2"}}},
                       {"model.dropout=0.1"});
}

TEST_F(Context, PipelinesShardsAndSplitsOnEightRanks) {
  expect_like_one_rank(
      "llama",
      {{8, {"layout.pipeline=2", "layout.shard=2", "layout.context=2", "train.microbatch=6"}},
       {8, {"layout.pipeline=2", "layout.context=2", "layout.tensor=2", "train.microbatch=12", "layout.schedule=zb-h1"}},
       {8, {"layout.shard=2", "layout.context=2", "layout.tensor=2", "layout.context_attention=heads"}}});
}

TEST_F(Context, DocumentsKeepToThemselvesOnEveryLayout) {
  const auto documents = with_documents(TokenFormat::megatron);
  for (const char* model : {"llama", "gpt2"})
    expect_like_one_rank(model,
                         {{2, {"layout.context=2", "train.microbatch=6"}},
                          {2, {"layout.context=2", "layout.context_attention=heads"}},
                          {2, {"layout.shard=2", "train.microbatch=4"}},
                          {4, {"layout.pipeline=2", "layout.context=2", "train.microbatch=6"}},
                          {4, {"layout.context=2", "layout.tensor=2"}}},
                         documents);
}

TEST_F(Context, BothFormatsHaveTheSameDocuments) {
  const auto one = run_model("gpt2", 1, with_documents(TokenFormat::llmc)),
             other = run_model("gpt2", 1, with_documents(TokenFormat::megatron));
  expect_same(one, other);
  auto joined = with_documents(TokenFormat::megatron);
  std::erase(joined, "data.documents=separate");
  EXPECT_NE(run_model("gpt2", 1, joined).losses(), other.losses());
}

TEST_F(Context, TwoRunsAreTheSameToTheBit) {
  for (const char* way : {"ring", "heads"}) {
    const Overrides layout{"layout.context=2", fmt::format("layout.context_attention={}", way)};
    EXPECT_EQ(run_model("llama", 2, layout).losses(), run_model("llama", 2, layout).losses()) << way;
  }
}

// Law 2 through the configuration.
TEST_F(Context, StepsHaveExactlyTheCollectivesOfThePlan) {
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout :
         {Overrides{"layout.context=4", "train.microbatch=12"},
          {"layout.context=4", "layout.context_attention=heads", "train.precision=bf16"},
          {"layout.context=2", "layout.replicate=2", "train.precision=bf16", "layout.recompute=full"},
          {"layout.context=2", "layout.shard=2", "layout.sharded=gradients"},
          {"layout.context=2", "layout.tensor=2", "layout.context_attention=heads"},
          {"layout.context=2", "layout.tensor=2", "layout.sequence_parallel=false", "layout.recompute=full"},
          {"layout.context=2", "layout.shard=2", "layout.context_attention=heads", "layout.recompute=full"},
          {"layout.context=2", "layout.shard=2", "layout.wrap=all"}})
      expect_collectives_of_plan(model, 4, layout);
}

TEST_F(Context, PipelinesHaveExactlyTheCollectivesOfThePlan) {
  for (const char* way : {"ring", "heads"}) {
    const Overrides both{"layout.pipeline=2", "layout.context=2", "layout.context_attention=" + std::string(way)};
    expect_collectives_of_plan("llama", 4, both + Overrides{"train.microbatch=12", "train.precision=bf16"});
    expect_collectives_of_plan("llama", 8,
                               both + Overrides{"layout.shard=2", "train.microbatch=6", "layout.recompute=full"});
    expect_collectives_of_plan("gpt2", 8,
                               both + Overrides{"layout.tensor=2", "train.microbatch=12", "layout.schedule=zb-h1"});
    expect_collectives_of_plan("llama", 8,
                               both + Overrides{"layout.tensor=2", "layout.sequence_parallel=false", "train.microbatch=12"});
  }
}

// All axes but replicate at once.
TEST_F(Context, SixteenRanksOfFourAxesRecompute) {
  const Overrides mesh{"layout.pipeline=2", "layout.shard=2",     "layout.context=2",
                       "layout.tensor=2",   "train.microbatch=6", "layout.recompute=full"};
  expect_like_one_rank("llama", {{16, mesh}});
  expect_collectives_of_plan("llama", 16, mesh);
}

// Also where the attention of others runs again.
TEST_F(Context, RecomputedBlocksHaveTheSameBits) {
  for (const char* model : {"llama", "gpt2"})
    for (const Overrides& layout : {Overrides{"layout.context=2", "train.microbatch=12"},
                                    {"layout.context=2", "layout.context_attention=heads", "train.precision=bf16"},
                                    {"layout.context=2", "layout.shard=2", "train.precision=bf16", "model.dropout=0.1"}}) {
      const bool drops = layout.back() == "model.dropout=0.1";
      if (drops && model == std::string("llama")) continue;
      SCOPED_TRACE(fmt::format("{} {}", model, fmt::join(layout, " ")));
      const int ranks = drops ? 4 : 2;
      const auto expected = run_model(model, ranks, layout),
                 made = run_model(model, ranks, layout + Overrides{"layout.recompute=full"});
      EXPECT_EQ(expected.error + made.error, "");
      EXPECT_EQ(made.losses(), expected.losses());
      EXPECT_EQ(made.metrics.back().at("grad_norm"), expected.metrics.back().at("grad_norm"));
    }
}

// Attention that ends with documents, in blocks that run again.
TEST_F(Context, DocumentsInReversibleAndRecomputedBlocks) {
  const auto documents = with_documents(TokenFormat::megatron);
  for (const char* model : {"llama", "gpt2"}) {
    expect_like_one_rank(model,
                         {{2, {"layout.shard=2", "train.microbatch=4"}}, {2, {"layout.pipeline=2", "train.microbatch=6"}}},
                         documents + Overrides{"model.reversible=true"});
    EXPECT_NE(run_model(model, 1, documents + Overrides{"model.reversible=true"}).losses(),
              run_model(model, 1, documents).losses());
    const auto plain = run_model(model, 2, documents + Overrides{"layout.context=2"}),
               again = run_model(model, 2, documents + Overrides{"layout.context=2", "layout.recompute=full"});
    EXPECT_EQ(plain.error + again.error, "");
    EXPECT_EQ(again.losses(), plain.losses());
  }
}

TEST_F(Context, ARunInEightBitsTrains) {
  const auto outcome =
      run_model("llama", 2, {"layout.context=2", "train.precision=fp8", "model.dim=32", "model.ffn=64", "train.steps=8"});
  EXPECT_EQ(outcome.error, "");
  ASSERT_EQ(outcome.metrics.size(), 8U);
  EXPECT_LT(outcome.losses().back(), outcome.losses().front());
}

TEST(ContextKeys, ThatCannotBeAreRefused) {
  const auto refused = [](const std::string& model, int ranks, const Overrides& overrides, const std::string& words) {
    testing::expect_part(testing::thrown<ConfigError>([&] {
                           Config config = parse_config(models.at(model) + common, "a.toml", overrides);
                           resolve(config, ranks);
                         }),
                         words);
  };
  refused("llama", 2, {"layout.context=2"},
          "layout.context = 2: data.sequence = 6 cannot be cut into 4 chunks, two for each rank; allowed: a multiple of 4");
  refused("vgg", 2, {"layout.context=2"}, "layout.context = 2: model.type is \"vgg\"");
  refused("mlp", 2, {"layout.context=2"}, "layout.context = 2: model.type is \"mlp\"");
  refused("gpt2", 4, {"layout.context=4", "data.sequence=16", "layout.context_attention=heads"},
          "layout.context_attention = \"heads\": model.heads gives a rank 2, which layout.context = 4 does not divide");
  refused("llama", 4, {"layout.context=4", "data.sequence=16", "layout.context_attention=heads"},
          "model.kv_heads gives a rank 2, which layout.context = 4 does not divide; allowed: ring, or a multiple of 4");
  refused("llama", 8, {"layout.context=2", "layout.tensor=4", "data.sequence=12"},
          "layout.context = 2: a rank's 6 positions (data.sequence / context) are divided among layout.tensor = 4 ranks");
  refused("llama", 4, {"layout.context=2", "layout.pipeline=2", "layout.stages=measured", "data.sequence=8"},
          "layout.stages = \"measured\"");
  refused("gpt2", 2, {"layout.context=2", "layout.context_attention=round", "data.sequence=8"},
          "layout.context_attention = \"round\"");
  refused("llama", 1, {"data.documents=separate"}, "data.documents = \"separate\"");
  refused("llama", 2, {"layout.context=2", "data.sequence=8", "model.reversible=true"},
          "layout.context = 2: blocks that make their inputs again in backward (model.reversible = true)");
  refused("llama", 2, {"layout.context=2", "data.sequence=8", "adapter.rank=2", "adapter.dropout=0.1", "checkpoint.every=0"},
          "adapter.dropout = 0.1: layout.context = 2 divides what adapters read among ranks; allowed with it: 0");
}

TEST(ContextKeys, StepsOfSharedSamplesAreNotCaptured) {
  Config config = parse_config(models.at("llama") + common, "a.toml", {"layout.context=2", "data.sequence=8"});
  resolve(config, 2);
  testing::expect_part(hindrance_to_graphs(config), "layout.context = 2");
}

}  // namespace
}  // namespace bonfire::context_test
