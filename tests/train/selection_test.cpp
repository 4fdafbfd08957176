#include "bonfire/train/selection.h"

#include <gtest/gtest.h>

#include <map>

#include <fmt/format.h>

namespace bonfire::selection_test {
namespace {

Config config_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  Config config = parse_config(text, "a.toml", overrides);
  resolve(config, 1);
  return config;
}

constexpr const char* gpt2 =
    "[model]\ntype = \"gpt2\"\ndim = 16\nlayers = 12\nheads = 2\nvocab = 40\n[data]\nsequence = 6\nbranching = 4\n";

TEST(Selection, APatternIsANameOrTheBeginningOfOne) {
  const auto name = "blocks.1.attention.qkv.weight";
  for (const char* pattern : {"blocks", "blocks.1", "blocks.1.attention.qkv.weight", "blocks.*.attention", "*.1", "b*s.1",
                              "blocks.1.att*n.*.weight", "*"})
    EXPECT_TRUE(names_parameter(pattern, name)) << pattern;
  for (const char* pattern : {"block", "blocks.", "blocks.11", "locks", "attention", "blocks.1.attention.qkv.weight.x", "",
                              "blocks.*.feed", "blocks.1*1", "*x"})
    EXPECT_FALSE(names_parameter(pattern, name)) << pattern;
  EXPECT_FALSE(names_parameter("blocks.1", "blocks.11.attention.qkv.weight"));
}

TEST(Selection, WhatIsFrozenIsNotTrained) {
  const auto model = model_of(config_of(gpt2, {"train.freeze=[\"embedding\", \"blocks.1\", \"blocks.*.feed.up.bias\"]"}));
  for (const auto& unit : model.units)
    for (const auto& parameter : unit.parameters) {
      const bool frozen = unit.name == "embedding" || unit.name == "blocks.1" || parameter.name == "feed.up.bias";
      EXPECT_EQ(parameter.trained, !frozen) << unit.name << "." << parameter.name;
    }
}

TEST(Selection, NormsAndEmbeddingsMayStayInFp32) {
  EXPECT_FALSE(kept_in_fp32(config_of(gpt2, {"train.precision=bf16"})));
  const auto norms = kept_in_fp32(config_of(gpt2, {"train.precision=bf16", "train.keep_fp32=[\"norms\"]"}));
  EXPECT_TRUE(norms("blocks.3.attention_norm.weight"));
  EXPECT_TRUE(norms("head.norm.bias"));
  EXPECT_FALSE(norms("embedding.tokens.weight"));
  EXPECT_FALSE(norms("blocks.3.attention.qkv.weight"));
  const auto more =
      kept_in_fp32(config_of(gpt2, {"train.precision=bf16", "train.keep_fp32=[\"embeddings\", \"attention_*.bias\"]"}));
  EXPECT_TRUE(more("embedding.tokens.weight"));
  EXPECT_TRUE(more("embedding.positions"));
  EXPECT_TRUE(more("blocks.3.attention_norm.bias"));
  EXPECT_TRUE(more("attention_norm.bias")) << "the name inside the Unit is enough";
  EXPECT_FALSE(more("feed.down.weight"));
  EXPECT_FALSE(more("blocks.3.attention_norm.weight"));
}

// Elements of each Unit that has some.
std::map<std::string, std::int64_t> elements(const plan::ModelDescription& model) {
  std::map<std::string, std::int64_t> all;
  for (const auto& unit : model.units)
    if (!unit.parameters.empty()) all[unit.name] = unit.parameter_elements();
  return all;
}

TEST(Selection, WrappingMovesParametersToTheRoot) {
  const auto whole = plan::describe(config_of(gpt2).model.spec);
  const auto own = elements(whole);
  EXPECT_EQ(elements(wrapped_model_of(config_of(gpt2))), own);

  const auto all = elements(wrapped_model_of(config_of(gpt2, {"layout.wrap=all"})));
  EXPECT_EQ(all, (std::map<std::string, std::int64_t>{{"", whole.parameter_elements()}}));

  const auto blocks = elements(wrapped_model_of(config_of(gpt2, {"layout.wrap_types=[\"block\"]"})));
  EXPECT_EQ(blocks.size(), 13u);
  EXPECT_EQ(blocks.at(""), own.at("embedding") + own.at("head"));
  EXPECT_EQ(blocks.at("blocks.3"), own.at("blocks.3"));

  const auto large = fmt::format("layout.wrap={}", own.at("blocks.0"));
  EXPECT_EQ(elements(wrapped_model_of(config_of(gpt2, {large}))).at("blocks.0"), own.at("blocks.0"));
  const auto larger = fmt::format("layout.wrap={}", own.at("blocks.0") + 1);
  EXPECT_FALSE(elements(wrapped_model_of(config_of(gpt2, {larger}))).contains("blocks.0"));
  const auto tied = elements(wrapped_model_of(config_of(gpt2, {"model.tied=true", "layout.wrap_types=[\"block\"]"})));
  EXPECT_EQ(tied.at(""), own.at("embedding") + own.at("head") - 40 * 16);
}

}  // namespace
}  // namespace bonfire::selection_test
