#include "bonfire/plan/model.h"

#include <gtest/gtest.h>

#include <set>

#include "bonfire/base/error.h"

namespace bonfire::plan::model_test {
namespace {

std::vector<ModelSpec> small_specs() {
  return {{.type = ModelType::llama, .kv_heads = 2},
          {.type = ModelType::llama, .head_dim = 64, .tied = true},
          {.type = ModelType::gpt2, .tied = true},
          {.type = ModelType::gpt2},
          {.type = ModelType::mlp},
          {.type = ModelType::mlp, .inputs = 12, .classes = 5},
          {.type = ModelType::vgg, .image = 32, .pool = 1, .convolutions = {8, 0, 16, 16, 0}}};
}

TEST(Model, PublishedShapesHaveThePublishedCounts) {
  const std::pair<const char*, std::int64_t> counts[] = {
      {"gpt2-124m", 124439808},    {"gpt2-355m", 354823168},    {"gpt2-774m", 774030080},    {"gpt2-1558m", 1557611200},
      {"llama2-7b", 6738415616},   {"llama2-13b", 13015864320}, {"llama2-70b", 68976648192}, {"llama3-8b", 8030261248},
      {"llama3-70b", 70553706496}, {"vgg11", 132863336},        {"vgg13", 133047848},        {"vgg16", 138357544},
      {"vgg19", 143667240}};
  EXPECT_EQ(std::size(counts), published_model_names().size());
  for (const auto& [name, count] : counts) EXPECT_EQ(describe(published_model(name)).parameter_elements(), count) << name;
}

TEST(Model, SlicesCoverEveryParameterAndPublicNamesAreUnique) {
  for (const auto& spec : small_specs()) {
    std::set<std::string> outside, inside;
    for (const auto& unit : describe(spec).units)
      for (const auto& parameter : unit.parameters) {
        EXPECT_TRUE(inside.insert(unit.name + "." + parameter.name).second);
        std::int64_t row = 0;
        for (const auto& slice : parameter.slices) {
          EXPECT_EQ(slice.begin, row) << slice.name;
          row += slice.rows;
          EXPECT_TRUE(outside.insert(slice.name).second) << slice.name;
        }
        EXPECT_EQ(row, parameter.shape[0]) << parameter.name;
      }
  }
}

TEST(Model, TransformerProductsCostTwoFlopsPerWeight) {
  const auto model = describe(published_model("llama3-8b"));
  for (const auto& unit : model.units) {
    if (unit.kind != UnitKind::block) continue;
    std::int64_t weights = 0;
    for (const auto& parameter : unit.parameters)
      if (parameter.shape.size() == 2) weights += parameter.elements();
    EXPECT_EQ(unit.product_flops, 2.0 * static_cast<double>(weights));
  }
  // A token in the middle of the sequence attends to half of it.
  const auto& block = model.unit("blocks.0");
  EXPECT_EQ(block.forward_flops(8191) - block.product_flops, 4.0 * 4096 * 4096);
}

TEST(Model, WidthScalesVgg16) {
  const auto model = describe({.type = ModelType::vgg, .classes = 10, .image = 32, .width = 8});
  EXPECT_EQ(model.unit("blocks.0").parameters[0].shape, (std::vector<std::int64_t>{8, 3, 3, 3}));
  EXPECT_EQ(model.unit("blocks.14").parameters[0].shape, (std::vector<std::int64_t>{512, 512}));
  EXPECT_EQ(model.units.size(), describe(published_model("vgg16")).units.size());
}

TEST(Model, Vgg16CostsWhatIsPublished) {
  double flops = 0;
  for (const auto& unit : describe(published_model("vgg16")).units) flops += unit.forward_flops(1);
  EXPECT_NEAR(flops, 2 * 15.47e9, 0.01e9);  // torchvision: 15.47 G multiply-adds
}

void expect_refused(ModelSpec spec, const std::string& key) {
  try {
    describe(spec);
    ADD_FAILURE() << "accepted a wrong " << key;
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("model." + key), std::string::npos) << error.what();
  }
}

TEST(Model, RefusesWhatCannotBe) {
  expect_refused({.heads = 7}, "heads");
  expect_refused({.kv_heads = 3}, "kv_heads");
  expect_refused({.dim = 24, .heads = 8}, "heads");
  expect_refused({.layers = 0}, "layers");
  expect_refused({.vocab = 0}, "vocab");
  expect_refused({.dropout = 1}, "dropout");
  expect_refused({.norm_eps = 0}, "norm_eps");
  expect_refused({.type = ModelType::gpt2, .kv_heads = 2}, "kv_heads");
  expect_refused({.type = ModelType::vgg, .convolutions = {0, 4}}, "convolutions");
  expect_refused({.type = ModelType::vgg, .image = 2, .convolutions = {4, 0, 4, 0}}, "image");
  expect_refused({.type = ModelType::mlp, .tied = true, .inputs = 3}, "tied");
  EXPECT_THROW(model_type("bert"), ConfigError);
  EXPECT_THROW(published_model("gpt5"), ConfigError);
}

}  // namespace
}  // namespace bonfire::plan::model_test
