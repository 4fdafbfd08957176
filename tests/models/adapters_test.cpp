// Low-rank adapters of our models.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/models/model.h"
#include "bonfire/plan/adapters.h"
#include "tests/support/thrown.h"

namespace bonfire::adapters_test {
namespace {

using at::Tensor;
using plan::ModelSpec;
using plan::ModelType;
using testing::thrown;

const std::map<std::string, ModelSpec> models = {
    {"llama", {.dim = 24, .layers = 2, .heads = 4, .kv_heads = 2, .ffn = 20, .vocab = 31, .positions = 16}},
    {"gpt2", {.type = ModelType::gpt2, .dim = 24, .layers = 2, .heads = 4, .ffn = 20, .vocab = 31, .positions = 16}},
    {"mlp", {.type = ModelType::mlp, .dim = 24, .layers = 2, .ffn = 20, .inputs = 7, .classes = 5}},
    {"vgg",
     {.type = ModelType::vgg, .ffn = 12, .classes = 5, .image = 8, .pool = 2, .width = 64, .convolutions = {4, 0, 6, 0}}}};

// Of each kind: all, one of a packed weight, some that the block has between others, one layer of one block.
const std::map<std::string, std::vector<std::vector<std::string>>> choices = {
    {"llama", {{}, {"v_proj"}, {"self_attn.q_proj", "down_proj"}, {"layers.1.mlp.gate_proj"}, {"lm_head", "*_proj"}}},
    {"gpt2", {{}, {"c_attn"}, {"mlp.c_proj"}, {"h.1.attn.c_proj", "c_fc"}}},
    {"mlp", {{}, {"down"}, {"embedding", "head"}}},
    {"vgg", {{}, {"classifier.3"}, {"0", "6"}}}};

struct Batch {
  Tensor input, target;
};

Batch batch_for(const ModelSpec& spec, at::ScalarType type = at::kDouble) {
  if (spec.type == ModelType::vgg)
    return {at::randn({3, 3, spec.image, spec.image}, type), at::randint(spec.classes, {3}, at::kLong)};
  if (spec.inputs) return {at::randn({3, spec.inputs}, type), at::randint(spec.classes, {3}, at::kLong)};
  return {at::randint(spec.vocab, {3, 9}, at::kLong), at::randint(spec.vocab, {3, 9}, at::kLong)};
}

ModelSpec with_adapters(ModelSpec spec, const std::vector<std::string>& match) {
  spec.adapter = {.rank = 3, .alpha = 6, .match = match};
  return spec;
}

template <class Body>
void for_each_case(const Body& body) {
  for (const auto& [name, spec] : models)
    for (const auto& match : choices.at(name)) {
      SCOPED_TRACE(fmt::format("{} {}", name, match.empty() ? "all" : match.front()));
      at::manual_seed(1);
      body(with_adapters(spec, match), spec);
    }
}

// The public parameters of a model without adapters, and the two matrices of each layer that has one.
struct Pair {
  Tensor a, b;
};
std::map<std::string, Pair> pairs_of(const Model& model) {
  std::map<std::string, Pair> pairs;
  for (const auto& parameter : model.public_parameters()) {
    const std::string& name = parameter.name;
    if (!name.starts_with(plan::peft_prefix)) continue;
    const auto end = name.rfind(".lora_");
    auto& pair = pairs[name.substr(plan::peft_prefix.size(), end - plan::peft_prefix.size())];
    (name.substr(end) == ".lora_A.weight" ? pair.a : pair.b) = parameter.tensor;
  }
  return pairs;
}

std::map<std::string, Tensor> weights_of(const Model& model) {
  std::map<std::string, Tensor> weights;
  for (const auto& parameter : model.public_parameters()) weights[parameter.name] = parameter.tensor;
  return weights;
}

// Transposed outside: gpt2's products.
bool is_stored_by_columns(const ModelSpec& spec) { return spec.type == ModelType::gpt2; }

TEST(Adapters, ChangeNothingAtFirst) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble})
    for_each_case([&](const ModelSpec& adapted, const ModelSpec& plain) {
      const Batch batch = batch_for(plain, type);
      const auto first = build_model(adapted, {.dtype = type}), second = build_model(plain, {.dtype = type});
      EXPECT_TRUE(first->loss(batch.input, batch.target).equal(second->loss(batch.input, batch.target)));
    });
}

// Gradients against those of the plain model at W + alpha / rank B A, by the chain rule; its loss too: it is the merged one.
TEST(Adapters, AreThePlainModelWithMergedWeights) {
  for_each_case([&](const ModelSpec& spec, const ModelSpec& without) {
    const auto adapted = build_model(spec, {.dtype = at::kDouble}), plain = build_model(without, {.dtype = at::kDouble});
    const double scale = 2;  // 6 / 3
    const auto pairs = pairs_of(*adapted);
    EXPECT_FALSE(pairs.empty());
    const auto weights = weights_of(*plain);
    for (const auto& [layer, pair] : pairs) {
      pair.b.copy_(at::randn_like(pair.b));
      const auto& weight = weights.at(layer + ".weight");
      const Tensor more = pair.b.mm(pair.a).mul(scale);
      weight.add_(is_stored_by_columns(spec) && layer != "lm_head" ? more.t() : more);
    }
    const Batch batch = batch_for(spec);
    const Tensor loss = adapted->loss(batch.input, batch.target), merged = plain->loss(batch.input, batch.target);
    EXPECT_NEAR(loss.item<double>(), merged.item<double>(), 1e-12 * merged.item<double>());
    loss.backward();
    merged.backward();

    std::set<std::string> trained;
    std::map<std::string, Tensor> gradients;  // by public names
    const auto take = [&](const Model& model) {
      const auto inside = model.named_parameters();
      for (const auto& unit : model.description().units)
        for (const auto& parameter : unit.parameters) {
          const Tensor& tensor = inside[unit.name.empty() ? parameter.name : unit.name + "." + parameter.name];
          EXPECT_EQ(tensor.grad().defined(), tensor.requires_grad()) << parameter.name;
          if (!tensor.grad().defined()) continue;
          for (const auto& slice : parameter.slices)
            gradients[slice.name] = tensor.grad().narrow(0, slice.begin, slice.rows);
        }
    };
    take(*plain);
    const auto of_weights = std::exchange(gradients, {});
    take(*adapted);
    EXPECT_EQ(gradients.size(), 2 * pairs.size());
    for (const auto& [layer, pair] : pairs) {
      const Tensor d = of_weights.at(layer + ".weight").mul(scale);
      const auto outside = std::string(plan::peft_prefix) + layer;
      const Tensor a = gradients.at(outside + ".lora_A.weight"), b = gradients.at(outside + ".lora_B.weight");
      EXPECT_LT((a - pair.b.t().mm(d)).norm().item<double>(), 1e-12 * a.norm().item<double>()) << layer;
      EXPECT_LT((b - d.mm(pair.a.t())).norm().item<double>(), 1e-12 * b.norm().item<double>()) << layer;
    }
  });
}

TEST(Adapters, HaveTheNamesOfPeft) {
  const auto names = [](const ModelSpec& spec) {
    std::vector<std::string> all;
    for (const auto& parameter : build_model(spec, {})->public_parameters())
      if (parameter.name.starts_with(plan::peft_prefix))
        all.push_back(parameter.name + " " + c10::str(parameter.tensor.sizes()));
    return all;
  };
  EXPECT_EQ(names(with_adapters(models.at("llama"), {"layers.1.self_attn.v_proj"})),
            (std::vector<std::string>{"base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight [3, 24]",
                                      "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight [12, 3]"}));
  EXPECT_EQ(names(with_adapters(models.at("gpt2"), {"h.0.attn.c_attn"})),
            (std::vector<std::string>{"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight [3, 24]",
                                      "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight [72, 3]"}));
}

TEST(Adapters, DropByStepAndSample) {
  ModelSpec spec = with_adapters(models.at("llama"), {});
  spec.adapter.dropout = 0.5;
  const auto model = build_model(spec, {.dtype = at::kDouble});
  for (const auto& [layer, pair] : pairs_of(*model)) pair.b.fill_(0.1);
  const Batch batch = batch_for(spec);
  const at::NoGradGuard no_grad;
  const auto logits = [&](std::uint64_t step, std::int64_t first, std::int64_t count) {
    model->set_dropout(step, first);
    return model->forward(batch.input.narrow(0, first, count));
  };
  const Tensor whole = logits(5, 0, 3);
  EXPECT_TRUE(at::allclose(whole, at::cat({logits(5, 0, 1), logits(5, 1, 2)}), 1e-12, 1e-12));
  EXPECT_FALSE(at::allclose(whole, logits(6, 0, 3)));
  model->eval();
  EXPECT_TRUE(logits(5, 0, 3).equal(logits(6, 0, 3)));
}

TEST(Adapters, OfNothingAreRefused) {
  const auto refusal = [](const char* model, const std::vector<std::string>& match) {
    return thrown<ConfigError>([&] { plan::describe(with_adapters(models.at(model), match)); });
  };
  EXPECT_EQ(refusal("llama", {"q_proj", "proj"}),
            "adapter.match holds \"proj\", which names no linear layer of this model; allowed: down_proj | gate_proj | "
            "k_proj | lm_head | o_proj | q_proj | up_proj | v_proj, and longer ends of their names, such as "
            "\"model.layers.0.self_attn.q_proj\"");
  EXPECT_NE(refusal("gpt2", {"q_proj"}).find("allowed: c_attn | c_fc | c_proj | lm_head"), std::string::npos);
  EXPECT_NE(refusal("llama", {"layers.2.self_attn.q_proj"}), "");
  EXPECT_NE(refusal("llama", {"embed_tokens"}), "");
  EXPECT_EQ(refusal("llama", {"blocks.*.attention.qkv"}), "");  // our own name stands for all of them
}

}  // namespace
}  // namespace bonfire::adapters_test
