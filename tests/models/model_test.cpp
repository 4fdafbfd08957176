#include "bonfire/models/model.h"

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/gradient_slots.h"
#include "bonfire/nn/unit.h"

namespace bonfire::model_test {
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
  add("llama reversible", [](ModelSpec& s) { s.reversible = true, s.kv_heads = 2; });
  add("gpt2 reversible", [](ModelSpec& s) { s.type = ModelType::gpt2, s.tied = s.reversible = true, s.dropout = 0.2; });
  // A part of what a packed product makes, with others left out; and everything.
  add("llama adapters", [](ModelSpec& s) {
    s.kv_heads = 2;
    s.adapter = {.rank = 3, .dropout = 0.3, .match = {"q_proj", "v_proj", "layers.1.*.o_proj", "up_proj", "lm_head"}};
  });
  add("gpt2 adapters", [](ModelSpec& s) { s.type = ModelType::gpt2, s.tied = true, s.adapter.rank = 5; });
  add("gpt2 reversible adapters", [](ModelSpec& s) {
    s.type = ModelType::gpt2, s.reversible = true, s.adapter = {.rank = 5, .dropout = 0.2, .match = {"c_attn", "c_fc"}};
  });
  add("mlp adapters", [](ModelSpec& s) { s.type = ModelType::mlp, s.adapter = {.rank = 2, .match = {"down", "head"}}; });
  add("mlp", [](ModelSpec& s) { s.type = ModelType::mlp; });
  add("mlp tied", [](ModelSpec& s) { s.type = ModelType::mlp, s.tied = true; });
  add("mlp vectors", [](ModelSpec& s) { s.type = ModelType::mlp, s.inputs = 7, s.classes = 5; });
  specs.emplace(
      "vgg",
      ModelSpec{.type = ModelType::vgg, .ffn = 12, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 6, 0}});
  return specs;
}

TEST(Models, AreBuiltWithWhatTheirDescriptionTrains) {
  for (const auto& [name, spec] : small_models()) {
    auto description = plan::describe(spec);
    std::map<std::string, bool> trained;
    bool next = false;
    for (auto& unit : description.units)
      for (auto& parameter : unit.parameters) {
        parameter.trained = next = !next;
        trained[unit.name.empty() ? parameter.name : unit.name + "." + parameter.name] = next;
      }
    const auto model = build_model(description, {});
    for (const auto& parameter : model->named_parameters())
      EXPECT_EQ(parameter.value().requires_grad(), trained.at(parameter.key())) << name << " " << parameter.key();
  }
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
      if (!item.value().requires_grad()) continue;
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

// The value of a public weight, drawn here without the library's packing: element i of the public layout is draw i.
TEST(Model, WeightsAreAFunctionOfSeedAndPublicName) {
  const plan::ModelSpec llama = small_models().at("llama grouped"), gpt2 = small_models().at("gpt2");
  for (const auto& [spec, name, deviation] :
       {std::tuple(llama, "model.layers.1.self_attn.k_proj.weight", 0.02),
        std::tuple(llama, "model.layers.0.mlp.up_proj.weight", 0.02),
        std::tuple(gpt2, "transformer.h.1.attn.c_attn.weight", 0.02),
        std::tuple(gpt2, "transformer.h.0.mlp.c_proj.weight", 0.02 / std::sqrt(2.0 * 2))}) {
    bool found = false;
    for (const auto& parameter : build_model(spec, {.seed = 7, .dtype = at::kDouble})->public_parameters()) {
      if (parameter.name != name) continue;
      found = true;
      const Random random = Random(7).fork(name);
      const Tensor flat = parameter.tensor.contiguous().view(-1);
      for (std::int64_t i = 0; i < flat.numel(); i += 13)
        EXPECT_NEAR(flat[i].item<double>(), deviation * random.normal(static_cast<std::uint64_t>(i)), 1e-15) << name;
    }
    EXPECT_TRUE(found) << name;
  }
}

TEST(Model, LayersOfADeeperModelStartAsThoseOfAShallowOne) {
  ModelSpec spec = small_models().at("llama");
  const auto shallow = build_model(spec, {})->named_parameters();
  spec.layers = 4;
  const auto deep = build_model(spec, {})->named_parameters();
  for (const auto& item : shallow) EXPECT_TRUE(item.value().equal(deep[item.key()])) << item.key();
}

TEST(Model, PublicNamesAreViewsInThePublicLayout) {
  const auto model = build_model(small_models().at("gpt2"), {});
  for (const auto& parameter : model->public_parameters()) {
    if (parameter.name == "transformer.h.0.mlp.c_fc.weight") {
      EXPECT_EQ(parameter.tensor.sizes(), (std::vector<std::int64_t>{24, 20}));
    }
    parameter.tensor.fill_(3);
  }
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.eq(3).all().item<bool>());
}

struct CountingHooks : UnitHook {
  void before_forward(UnitSeam& unit, std::vector<Tensor>&) override { order.push_back(&unit); }
  void after_forward(UnitSeam&, std::vector<Tensor>& outputs) override { EXPECT_EQ(outputs.size(), 1U); }
  std::vector<UnitSeam*> order;
};

TEST(Model, UnitsRunInTheOrderOfTheDescription) {
  for (const auto& [name, spec] : small_models()) {
    const auto model = build_model(spec, {.dtype = at::kDouble});
    CountingHooks hooks;
    std::vector<UnitSeam*> expected{unit_of(*model)};
    for (const auto& layer : model->layers()) expected.push_back(unit_of(*layer));
    expected.push_back(unit_of(*model->head()));
    for (UnitSeam* unit : expected) unit->hooks().add(hooks);
    const Batch batch = batch_for(spec, 2);
    model->loss(batch.input, batch.target);
    EXPECT_EQ(hooks.order, expected) << name;
  }
}

struct Sink : GradientSink {
  Tensor memory;
  bool written = false;
  int arrivals = 0;
  Tensor buffer(bool& fresh) override {
    fresh = !written;
    written = true;
    return memory;
  }
  void arrived() override { ++arrivals; }
};

TEST(Model, SinksReceiveTheGradientsOfAutogradTiedOnesTwice) {
  for (const auto& [name, spec] : small_models()) {
    SCOPED_TRACE(name);
    at::manual_seed(4);
    const auto plain = build_model(spec, {.dtype = at::kDouble}), sunk = build_model(spec, {.dtype = at::kDouble});
    std::map<std::string, std::pair<std::shared_ptr<Sink>, int>> sinks;
    for (const auto& item : sunk->named_parameters()) {
      auto sink = std::make_shared<Sink>();
      sink->memory = at::full_like(item.value(), NAN).detach();
      if (const int users = set_gradient_sink(*sunk, item.key(), sink)) sinks[item.key()] = {sink, users};
    }
    EXPECT_EQ(sinks.count("tokens") ? sinks["tokens"].second : 2, 2);
    const Batch batch = batch_for(spec, 3);
    plain->loss(batch.input, batch.target).backward();
    sunk->loss(batch.input, batch.target).backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : sunk->named_parameters()) {
      if (!item.value().requires_grad()) continue;
      const auto sink = sinks.find(item.key());
      const Tensor gradient = sink == sinks.end() ? item.value().grad() : sink->second.first->memory;
      if (sink != sinks.end()) {
        EXPECT_EQ(sink->second.first->arrivals, sink->second.second) << item.key();
      }
      EXPECT_TRUE(at::allclose(gradient, expected[item.key()].grad(), 1e-12, 1e-15)) << item.key();
    }
  }
}

TEST(Model, DropoutDependsOnStepAndSampleNotOnTheSlice) {
  for (const char* name : {"gpt2", "mlp vectors", "vgg"}) {
    SCOPED_TRACE(name);
    at::manual_seed(3);
    ModelSpec spec = small_models().at(name);
    spec.dropout = 0.4;
    const auto model = build_model(spec, {.dtype = at::kDouble});
    const Batch batch = batch_for(spec, 4);
    at::NoGradGuard no_grad;
    const auto logits = [&](std::uint64_t step, std::int64_t first, std::int64_t count) {
      model->set_dropout(step, first);
      return model->forward(batch.input.narrow(0, first, count));
    };
    const Tensor whole = logits(5, 0, 4);
    EXPECT_TRUE(at::allclose(whole, at::cat({logits(5, 0, 1), logits(5, 1, 3)}), 1e-12, 1e-12));
    EXPECT_FALSE(at::allclose(whole, logits(6, 0, 4)));
    model->eval();
    EXPECT_TRUE(logits(5, 0, 4).equal(logits(6, 0, 4)));
  }
}

TEST(Model, NarrowTypesFollowTheWideOne) {
  for (const auto& [name, spec] : small_models())
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      at::manual_seed(6);
      const auto wide = build_model(spec, {.dtype = at::kDouble}), narrow = build_model(spec, {.dtype = type});
      const Batch batch = batch_for(spec, 3);
      const Tensor loss = narrow->loss(batch.input, batch.target);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      loss.backward();
      const double expected = wide->loss(batch.input, batch.target).item<double>();
      EXPECT_NEAR(loss.item<double>(), expected, (type == at::kFloat ? 1e-6 : 0.02) * expected) << name;
      for (const auto& parameter : narrow->parameters())
        EXPECT_TRUE(!parameter.requires_grad() || parameter.grad().isfinite().all().item<bool>());
    }
}

TEST(Model, RefusesWhatItDoesNotKnow) {
  const auto llama = build_model(small_models().at("llama"), {}), gpt2 = build_model(small_models().at("gpt2"), {});
  const Tensor unknown = at::full({1, 3}, 31, at::kLong), long_sequence = at::zeros({1, 17}, at::kLong);
  EXPECT_THROW(llama->forward(unknown), Error);
  EXPECT_THROW(llama->forward(long_sequence), Error);
  EXPECT_THROW(gpt2->forward(long_sequence), Error);
}

}  // namespace
}  // namespace bonfire::model_test
