#include "bonfire/models/model.h"

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/gradient_slots.h"
#include "bonfire/nn/unit.h"

namespace bonfire {
namespace {

using at::Tensor;
using plan::ModelSpec;
using plan::ModelType;

std::map<std::string, ModelSpec> small_models() {
  ModelSpec base{.dim = 24, .layers = 2, .heads = 4, .ffn = 20, .vocab = 31, .positions = 16};
  std::map<std::string, ModelSpec> specs;
  const auto add = [&](const char* name, auto change) {
    ModelSpec spec = base;
    change(spec);
    specs.emplace(name, spec);
  };
  add("llama", [](ModelSpec&) {});
  add("llama grouped", [](ModelSpec& s) { s.kv_heads = 2; });
  add("llama head_dim", [](ModelSpec& s) { s.head_dim = 8; });
  add("llama tied", [](ModelSpec& s) { s.tied = true; });
  add("gpt2", [](ModelSpec& s) { s.type = ModelType::gpt2, s.tied = true; });
  add("gpt2 untied", [](ModelSpec& s) { s.type = ModelType::gpt2; });
  add("mlp", [](ModelSpec& s) { s.type = ModelType::mlp; });
  add("mlp tied", [](ModelSpec& s) { s.type = ModelType::mlp, s.tied = true; });
  add("mlp vectors", [](ModelSpec& s) { s.type = ModelType::mlp, s.inputs = 7, s.classes = 5; });
  specs.emplace(
      "vgg",
      ModelSpec{.type = ModelType::vgg, .ffn = 12, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 6, 0}});
  return specs;
}

// Tiny products: threads would only wait for each other.
const bool one_thread = [] {
  at::set_num_threads(1);
  return true;
}();

struct Batch {
  Tensor input, target;
};

Batch batch_for(const ModelSpec& spec, std::int64_t samples, at::ScalarType type = at::kDouble) {
  if (spec.type == ModelType::vgg)
    return {at::randn({samples, spec.channels, spec.image, spec.image}, type),
            at::randint(spec.classes, {samples}, at::kLong)};
  if (spec.inputs) return {at::randn({samples, spec.inputs}, type), at::randint(spec.classes, {samples}, at::kLong)};
  return {at::randint(spec.vocab, {samples, 9}, at::kLong), at::randint(spec.vocab, {samples, 9}, at::kLong)};
}

TEST(Model, HasTheParametersOfItsDescription) {
  for (const auto& [name, spec] : small_models()) {
    SCOPED_TRACE(name);
    const auto model = build_model(spec, {});
    std::vector<std::string> described, built;
    for (const auto& unit : model->description().units)
      for (const auto& parameter : unit.parameters)
        described.push_back((unit.name.empty() ? "" : unit.name + ".") + parameter.name + " " +
                            c10::str(c10::IntArrayRef(parameter.shape)));
    for (const auto& item : model->named_parameters()) built.push_back(item.key() + " " + c10::str(item.value().sizes()));
    EXPECT_EQ(described, built);

    for (const auto& unit : model->description().units) {
      torch::nn::Module* module = model.get();
      for (const auto& item : model->named_modules("", false))
        if (item.key() == unit.name) module = item.value().get();
      EXPECT_TRUE(unit_of(*module)) << unit.name;
      std::vector<std::string> names, expected;
      for (const auto& item : module->named_parameters(!unit.name.empty())) names.push_back(item.key());
      for (const auto& parameter : unit.parameters) expected.push_back(parameter.name);
      EXPECT_EQ(names, expected) << unit.name;
    }
  }
}

TEST(Model, LossIsTheMeanOverItsLogits) {
  for (const auto& [name, spec] : small_models()) {
    SCOPED_TRACE(name);
    at::manual_seed(1);
    const auto model = build_model(spec, {.dtype = at::kDouble});
    const Batch batch = batch_for(spec, 3);
    const Tensor logits = model->forward(batch.input);
    const Tensor expected = at::cross_entropy_loss(logits.flatten(0, -2), batch.target.flatten());
    EXPECT_NEAR(model->loss(batch.input, batch.target).item<double>(), expected.item<double>(), 1e-13);
    EXPECT_EQ(logits.size(-1), model->description().spec.outputs());
  }
}

// Gradients against differences, along random directions in each parameter.
TEST(Model, GradientsAreTheSlopesOfTheLoss) {
  for (const auto& [name, spec] : small_models()) {
    at::manual_seed(2);
    const auto model = build_model(spec, {.dtype = at::kDouble});
    {  // far from the start, where nothing is nearly linear
      at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.add_(at::randn_like(parameter), 0.2);
    }
    const Batch batch = batch_for(spec, 3);
    model->loss(batch.input, batch.target).backward();
    at::NoGradGuard no_grad;
    for (const auto& item : model->named_parameters()) {
      const Tensor direction = at::randn_like(item.value());
      ASSERT_TRUE(item.value().grad().defined()) << name << " " << item.key();
      const double slope = (item.value().grad() * direction).sum().item<double>(), step = 1e-5;
      item.value().add_(direction, step);
      const double above = model->loss(batch.input, batch.target).item<double>();
      item.value().add_(direction, -2 * step);
      const double below = model->loss(batch.input, batch.target).item<double>();
      item.value().add_(direction, step);
      EXPECT_NEAR((above - below) / (2 * step), slope, 1e-6 * std::max(1.0, std::abs(slope))) << name << " " << item.key();
    }
  }
}

}  // namespace
}  // namespace bonfire
