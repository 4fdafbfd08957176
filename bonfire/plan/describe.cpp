#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "bonfire/plan/adapters.h"
#include "bonfire/plan/model.h"
#include "bonfire/plan/reversible.h"
#include "bonfire/plan/tensor_part.h"

namespace bonfire::plan {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr double kDeviation = 0.02;  // what GPT-2 and Llama start from

Init normal(double deviation) { return {InitKind::normal, deviation}; }

// A parameter that one public name stands for.
ParameterDescription plain(std::string name, Shape shape, Init init, std::string public_name) {
  const std::int64_t rows = shape[0];
  return {.name = std::move(name), .shape = std::move(shape), .init = init, .slices = {{std::move(public_name), 0, rows}}};
}

// A product's weight that is stored [in, out] outside.
ParameterDescription transposed(std::string name, Shape shape, Init init, std::string public_name) {
  auto parameter = plain(std::move(name), std::move(shape), init, std::move(public_name));
  parameter.slices[0].transposed = true;
  return parameter;
}

struct Part {
  std::string name;
  std::int64_t rows;
};

// Several public weights on top of each other, so that one product serves them all.
ParameterDescription packed(std::string name, std::int64_t columns, Init init, const std::vector<Part>& parts) {
  ParameterDescription parameter{.name = std::move(name), .shape = {0, columns}, .init = init, .slices = {}};
  for (const auto& part : parts) {
    parameter.slices.push_back({part.name, parameter.shape[0], part.rows});
    parameter.shape[0] += part.rows;
  }
  return parameter;
}

// Ranks that split the layers divide the results of this product among them: its rows.
ParameterDescription by_rows(ParameterDescription parameter, std::vector<std::int64_t> parts = {}) {
  parameter.split = Split::rows;
  parameter.parts = std::move(parts);
  return parameter;
}

// They divide what this product reads: its columns.
ParameterDescription by_columns(ParameterDescription parameter) {
  parameter.split = Split::columns;
  return parameter;
}

// What ranks exchange is whole: the gradient of what a split product made, that of what it read, and that itself. Beside the
// weight's gradient all of it is there.
void hold_exchanged(UnitDescription& unit, const TensorPart& part, std::int64_t dim) {
  if (part.ranks == 1) return;
  const std::int64_t gathered = part.sequence ? dim : 0;
  unit.working_elements = std::max(unit.working_elements, 2 * dim) + gathered;
  unit.working_beside_weight = std::max(unit.working_beside_weight, 2 * dim) + gathered;
}

double product(std::int64_t in, std::int64_t out) { return 2.0 * static_cast<double>(in) * static_cast<double>(out); }

// The Unit that turns hidden states into logits or a loss. The loss keeps its gradient in place of the logits.
UnitDescription output_head(const ModelSpec& spec, const TensorPart& part) {
  // An mlp of vectors has no vocabulary to split, and no ranks that would.
  const std::int64_t outputs = part.length(spec.outputs());
  UnitDescription head{.name = "head",
                       .kind = UnitKind::head,
                       .product_flops = product(spec.dim, outputs),
                       .saved_elements = 2 * elements_between(part, spec.dim) + outputs,
                       .saved_statistics = 1,
                       .output_elements = outputs,
                       .working_elements = 2 * spec.dim,
                       .working_beside_weight = 2 * spec.dim,
                       .weight_elements = outputs * spec.dim};
  hold_exchanged(head, part, spec.dim);
  return head;
}

// Where the head is tied, the root holds the embedding, because two Units read it.
void add_embedding(ModelDescription& model, const std::string& public_name) {
  const auto& spec = model.spec;
  auto weight = by_rows(plain("tokens.weight", {spec.vocab, spec.dim}, normal(kDeviation), public_name));
  UnitDescription embedding{.name = "embedding", .kind = UnitKind::embedding, .output_elements = spec.dim};
  if (spec.tied) {
    weight.name = "tokens";
    embedding.shared = {"tokens"};
    model.units.push_back({.name = "", .kind = UnitKind::root, .parameters = {std::move(weight)}});
  } else {
    embedding.parameters.push_back(std::move(weight));
  }
  model.units.push_back(std::move(embedding));
}

void describe_llama(ModelDescription& model) {
  const auto& spec = model.spec;
  const std::int64_t dim = spec.dim, query = spec.heads * spec.head_dim, key = spec.kv_heads * spec.head_dim;
  const TensorPart& part = model.tensor;
  const auto [own_heads, own_kv_heads, sharing] = heads_of(spec, part);
  const std::int64_t own_query = own_heads * spec.head_dim, own_key = own_kv_heads * spec.head_dim,
                     own_ffn = part.length(spec.ffn), made = own_query + 2 * own_key / sharing;
  const Init ones{InitKind::ones};
  model.constant_bytes = 4 * spec.positions * spec.head_dim;  // the sines and cosines of the positions
  add_embedding(model, "model.embed_tokens.weight");
  for (std::int64_t i = 0; i < spec.layers; ++i) {
    const auto outside = [&](const char* name) { return fmt::format("model.layers.{}.{}.weight", i, name); };
    UnitDescription block{.name = fmt::format("blocks.{}", i), .kind = UnitKind::block};
    block.parameters = {
        plain("attention_norm.weight", {dim}, ones, outside("input_layernorm")),
        by_rows(packed("attention.qkv.weight", dim, normal(kDeviation),
                       {{outside("self_attn.q_proj"), query},
                        {outside("self_attn.k_proj"), key},
                        {outside("self_attn.v_proj"), key}}),
                {query, key, key}),
        by_columns(plain("attention.output.weight", {dim, query}, normal(kDeviation), outside("self_attn.o_proj"))),
        plain("feed_norm.weight", {dim}, ones, outside("post_attention_layernorm")),
        by_rows(packed("feed.gate_up.weight", dim, normal(kDeviation),
                       {{outside("mlp.gate_proj"), spec.ffn}, {outside("mlp.up_proj"), spec.ffn}}),
                {spec.ffn, spec.ffn}),
        by_columns(plain("feed.down.weight", {dim, spec.ffn}, normal(kDeviation), outside("mlp.down_proj")))};
    block.product_flops = product(dim, made) + product(own_query, dim) + product(dim, 2 * own_ffn) + product(own_ffn, dim);
    block.attention_flops_per_position = 4.0 * static_cast<double>(own_query);
    // Input, q, k, v, attention's output, the middle of the block, gate and up. Norms and the product of gate and up are
    // made again.
    block.saved_elements = 2 * elements_between(part, dim) + 2 * own_query + 2 * own_key + 2 * own_ffn;
    block.saved_statistics = elements_between(part, 2) + own_heads;
    block.output_elements = dim;
    // The gradients of gate and up, and their product again; in attention q, k, v and their output are still kept.
    block.working_elements = std::max(3 * own_ffn, 2 * own_query + 2 * own_key - dim - 2 * own_ffn);
    block.working_beside_weight = 3 * own_ffn;
    block.weight_elements = dim * own_ffn;
    hold_exchanged(block, part, dim);
    model.units.push_back(std::move(block));
  }
  UnitDescription head = output_head(spec, part);
  head.parameters.push_back(plain("norm.weight", {dim}, ones, "model.norm.weight"));
  if (spec.tied)
    head.shared = {"tokens"};
  else
    head.parameters.push_back(by_rows(plain("output.weight", {spec.vocab, dim}, normal(kDeviation), "lm_head.weight")));
  model.units.push_back(std::move(head));
}

void describe_gpt2(ModelDescription& model) {
  const auto& spec = model.spec;
  const std::int64_t dim = spec.dim;
  const TensorPart& part = model.tensor;
  const std::int64_t own_query = heads_of(spec, part).heads * spec.head_dim, own_ffn = part.length(spec.ffn);
  const Init ones{InitKind::ones}, zeros{InitKind::zeros};
  // Each block adds to the residual stream twice; GPT-2 starts those products smaller, so that the sum keeps its size.
  const Init residual = normal(kDeviation / std::sqrt(2.0 * static_cast<double>(spec.layers)));
  add_embedding(model, "transformer.wte.weight");
  auto& own = model.units.back().parameters;
  own.insert(own.begin(), plain("positions", {spec.positions, dim}, normal(kDeviation), "transformer.wpe.weight"));
  for (std::int64_t i = 0; i < spec.layers; ++i) {
    const auto outside = [&](const char* name) { return fmt::format("transformer.h.{}.{}", i, name); };
    UnitDescription block{.name = fmt::format("blocks.{}", i), .kind = UnitKind::block};
    block.parameters = {
        plain("attention_norm.weight", {dim}, ones, outside("ln_1.weight")),
        plain("attention_norm.bias", {dim}, zeros, outside("ln_1.bias")),
        by_rows(transposed("attention.qkv.weight", {3 * dim, dim}, normal(kDeviation), outside("attn.c_attn.weight")),
                {dim, dim, dim}),
        by_rows(plain("attention.qkv.bias", {3 * dim}, zeros, outside("attn.c_attn.bias")), {dim, dim, dim}),
        by_columns(transposed("attention.output.weight", {dim, dim}, residual, outside("attn.c_proj.weight"))),
        plain("attention.output.bias", {dim}, zeros, outside("attn.c_proj.bias")),
        plain("feed_norm.weight", {dim}, ones, outside("ln_2.weight")),
        plain("feed_norm.bias", {dim}, zeros, outside("ln_2.bias")),
        by_rows(transposed("feed.up.weight", {spec.ffn, dim}, normal(kDeviation), outside("mlp.c_fc.weight"))),
        by_rows(plain("feed.up.bias", {spec.ffn}, zeros, outside("mlp.c_fc.bias"))),
        by_columns(transposed("feed.down.weight", {dim, spec.ffn}, residual, outside("mlp.c_proj.weight"))),
        plain("feed.down.bias", {dim}, zeros, outside("mlp.c_proj.bias"))};
    block.product_flops = product(dim, 3 * own_query) + product(own_query, dim) + 2 * product(dim, own_ffn);
    block.attention_flops_per_position = 4.0 * static_cast<double>(own_query);
    block.saved_elements = 2 * elements_between(part, dim) + 4 * own_query + own_ffn;
    block.saved_statistics = elements_between(part, 4) + heads_of(spec, part).heads;
    block.output_elements = dim;
    block.working_elements = block.working_beside_weight = 2 * own_ffn;
    block.weight_elements = dim * own_ffn;
    hold_exchanged(block, part, dim);
    model.units.push_back(std::move(block));
  }
  UnitDescription head = output_head(spec, part);
  head.saved_statistics += 1;
  head.parameters = {plain("norm.weight", {dim}, ones, "transformer.ln_f.weight"),
                     plain("norm.bias", {dim}, zeros, "transformer.ln_f.bias")};
  if (spec.tied)
    head.shared = {"tokens"};
  else
    head.parameters.push_back(by_rows(plain("output.weight", {spec.vocab, dim}, normal(kDeviation), "lm_head.weight")));
  model.units.push_back(std::move(head));
}

void describe_mlp(ModelDescription& model) {
  const auto& spec = model.spec;
  const std::int64_t dim = spec.dim;
  const Init zeros{InitKind::zeros};
  const auto fan_in = [](std::int64_t in) { return normal(1 / std::sqrt(static_cast<double>(in))); };
  if (spec.inputs) {
    UnitDescription entry{.name = "embedding", .kind = UnitKind::embedding};
    entry.parameters = {plain("linear.weight", {dim, spec.inputs}, fan_in(spec.inputs), "embedding.weight"),
                        plain("linear.bias", {dim}, zeros, "embedding.bias")};
    entry.product_flops = product(spec.inputs, dim);
    entry.saved_casts = spec.inputs;
    entry.output_elements = dim;
    model.units.push_back(std::move(entry));
  } else {
    add_embedding(model, "embedding.weight");
  }
  for (std::int64_t i = 0; i < spec.layers; ++i) {
    const auto outside = [&](const char* name) { return fmt::format("blocks.{}.{}", i, name); };
    UnitDescription block{.name = fmt::format("blocks.{}", i), .kind = UnitKind::block};
    block.parameters = {plain("feed.up.weight", {spec.ffn, dim}, fan_in(dim), outside("up.weight")),
                        plain("feed.up.bias", {spec.ffn}, zeros, outside("up.bias")),
                        plain("feed.down.weight", {dim, spec.ffn}, fan_in(spec.ffn), outside("down.weight")),
                        plain("feed.down.bias", {dim}, zeros, outside("down.bias"))};
    block.product_flops = 2 * product(dim, spec.ffn);
    block.saved_elements = dim + spec.ffn;
    block.output_elements = dim;
    block.working_elements = block.working_beside_weight = 2 * spec.ffn;
    block.weight_elements = dim * spec.ffn;
    model.units.push_back(std::move(block));
  }
  UnitDescription head = output_head(spec, model.tensor);
  head.saved_elements = dim + spec.outputs();
  head.saved_statistics = 0;
  if (spec.tied)
    head.shared = {"tokens"};
  else
    head.parameters.push_back(plain("output.weight", {spec.outputs(), dim}, fan_in(dim), "head.weight"));
  model.units.push_back(std::move(head));
}

// torchvision's names count every layer of its two sequences, those without parameters too.
void describe_vgg(ModelDescription& model) {
  const auto& spec = model.spec;
  const Init zeros{InitKind::zeros};
  std::int64_t channels = spec.channels, side = spec.image, place = 0, block_number = 0;
  bool pooled = false;  // what comes in is a pooling's, so nobody has kept it yet
  for (const std::int64_t out : spec.convolutions) {
    if (out == 0) {  // part of the Unit before it
      auto& last = model.units.back();
      const std::int64_t before = channels * side * side;
      side /= 2;
      place += 1;
      last.output_elements = channels * side * side;
      last.saved_statistics += 2 * last.output_elements;  // which pixel won: 8 bytes each
      if (pooled) last.saved_elements += before;
      // The gradients before and behind the rectifier, when that of the output and the winners have gone.
      last.working_elements = std::max(before, 2 * before - 3 * last.output_elements);
      last.working_beside_weight += before - 3 * last.output_elements;
      pooled = true;
      continue;
    }
    UnitDescription block{.name = fmt::format("blocks.{}", block_number++), .kind = UnitKind::block};
    block.parameters = {plain("weight", {out, channels, 3, 3}, normal(std::sqrt(2.0 / (9.0 * static_cast<double>(out)))),
                              fmt::format("features.{}.weight", place)),
                        plain("bias", {out}, zeros, fmt::format("features.{}.bias", place))};
    const std::int64_t input = channels * side * side;
    block.product_flops = product(9 * channels, out) * static_cast<double>(side * side);
    block.output_elements = out * side * side;
    // The rectifier's result, which the next Unit reads; the input only where no rectifier holds it.
    block.saved_elements = block.output_elements + (pooled ? input : 0);
    block.saved_casts = block_number == 1 ? input : 0;
    block.working_elements = block.output_elements;
    // When the rectifier's gradient has replaced its result: the input's, and both once more in the kernel's own order.
    block.working_beside_weight = block_number == 1 ? input : 2 * input;
    block.weight_elements = 9 * channels * out;
    block.weight_apart = true;
    model.units.push_back(std::move(block));
    channels = out;
    pooled = false;
    place += 2;
  }
  const double deviation = 0.01;
  const std::int64_t map = channels * side * side;
  std::int64_t in = channels * spec.pool * spec.pool;
  for (const std::int64_t index : {0, 3}) {
    UnitDescription block{.name = fmt::format("blocks.{}", block_number++), .kind = UnitKind::block};
    block.parameters = {
        plain("linear.weight", {spec.ffn, in}, normal(deviation), fmt::format("classifier.{}.weight", index)),
        plain("linear.bias", {spec.ffn}, zeros, fmt::format("classifier.{}.bias", index))};
    block.product_flops = product(in, spec.ffn);
    block.saved_elements = spec.ffn + (index == 0 ? in + (pooled ? map : 0) : 0);
    block.output_elements = spec.ffn;
    block.working_elements = std::max(spec.ffn, in - spec.ffn);
    block.working_beside_weight = in - spec.ffn;
    block.weight_elements = spec.ffn * in;
    model.units.push_back(std::move(block));
    in = spec.ffn;
  }
  UnitDescription head{.name = "head", .kind = UnitKind::head};
  head.parameters = {plain("output.weight", {spec.classes, in}, normal(deviation), "classifier.6.weight"),
                     plain("output.bias", {spec.classes}, zeros, "classifier.6.bias")};
  head.product_flops = product(in, spec.classes);
  head.saved_elements = spec.classes;
  head.output_elements = spec.classes;
  head.working_elements = head.working_beside_weight = spec.classes + in;
  head.weight_elements = spec.classes * in;
  model.units.push_back(std::move(head));
}

}  // namespace

ModelDescription describe(const ModelSpec& spec) { return describe(spec, {}); }

ModelDescription describe(const ModelSpec& spec, const TensorPart& part) {
  ModelDescription model{.spec = resolve(spec), .units = {}, .tensor = part};
  require_splits(model.spec, part);
  switch (spec.type) {
    case ModelType::llama: describe_llama(model); break;
    case ModelType::gpt2: describe_gpt2(model); break;
    case ModelType::mlp: describe_mlp(model); break;
    case ModelType::vgg: describe_vgg(model); break;
  }
  if (model.spec.adapter.rank > 0) add_adapters(model);
  if (model.spec.reversible) make_reversible(model);
  if (part.ranks > 1) take_part(model);
  return model;
}

}  // namespace bonfire::plan
