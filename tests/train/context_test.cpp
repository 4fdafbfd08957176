// The real loop with ranks that share samples, and with documents that keep to themselves, against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/random.h"
#include "bonfire/data/token_writer.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"
#include "tests/train/step_collectives.h"

namespace bonfire::context_test {
namespace {

using testing::common;
using testing::Loop;
using testing::models;
using testing::Outcome;
using testing::planned_collectives;
using testing::traced_collectives;

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
    for (const Overrides& layout : {Overrides{"layout.context=4", "train.microbatch=12"},
                                    {"layout.context=4", "layout.context_attention=heads", "train.precision=bf16"},
                                    {"layout.context=2", "layout.replicate=2", "train.precision=bf16"},
                                    {"layout.context=2", "layout.shard=2", "layout.sharded=gradients"},
                                    {"layout.context=2", "layout.tensor=2", "layout.context_attention=heads"},
                                    {"layout.context=2", "layout.shard=2", "layout.wrap=all"}}) {
      const Overrides all = layout + Overrides{"train.trace_from=3", "train.trace_steps=1"};
      const auto outcome = run_model(model, 4, all);
      ASSERT_EQ(outcome.error, "");
      Config config = parse_config(models.at(model) + common, "a.toml", all + shape_of(model));
      resolve(config, 4);
      EXPECT_EQ(traced_collectives(outcome.folder), planned_collectives(wrapped_model_of(config), data_parallel_of(config)))
          << fmt::format("{} {}", model, fmt::join(layout, " "));
    }
}

TEST_F(Context, PipelinesHaveExactlyTheCollectivesOfThePlan) {
  for (const char* way : {"ring", "heads"}) {
    const Overrides all = Overrides{"layout.pipeline=2",
                                    "layout.context=2",
                                    "train.microbatch=12",
                                    "train.trace_from=3",
                                    "train.trace_steps=1",
                                    "train.precision=bf16",
                                    "layout.context_attention=" + std::string(way)};
    const auto outcome = run_model("llama", 4, all);
    ASSERT_EQ(outcome.error, "");
    Config config = parse_config(models.at("llama") + common, "a.toml", all + shape_of("llama"));
    resolve(config, 4);
    plan::PipelineLayout layout{.table = table_of(config), .tokens = 16 / 2, .data = data_parallel_of(config)};
    for (const auto& range : stages_of(config, layout.table.stages)) layout.stages.push_back({range.begin, range.end});
    layout.samples.assign(4, 12);
    std::vector<std::string> planned;
    // Rank 1 has the first stage.
    for (const auto& collective : plan::collectives_of_step(model_of(config), layout, 0))
      planned.push_back(fmt::format("{} {}", name_of(collective.kind), collective.bytes));
    std::sort(planned.begin(), planned.end());
    EXPECT_EQ(traced_collectives(outcome.folder), planned) << way;
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
}

TEST(ContextKeys, StepsOfSharedSamplesAreNotCaptured) {
  Config config = parse_config(models.at("llama") + common, "a.toml", {"layout.context=2", "data.sequence=8"});
  resolve(config, 2);
  testing::expect_part(hindrance_to_graphs(config), "layout.context = 2");
}

}  // namespace
}  // namespace bonfire::context_test
