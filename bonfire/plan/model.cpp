#include "bonfire/plan/model.h"

#include <algorithm>
#include <functional>
#include <map>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire::plan {
namespace {

const std::map<std::string, ModelType, std::less<>> kTypes{
    {"llama", ModelType::llama}, {"gpt2", ModelType::gpt2}, {"vgg", ModelType::vgg}, {"mlp", ModelType::mlp}};

ModelSpec llama(ModelSpec spec) {
  spec.type = ModelType::llama;
  return spec;
}

ModelSpec gpt2(std::int64_t dim, std::int64_t layers, std::int64_t heads) {
  return {.type = ModelType::gpt2,
          .dim = dim,
          .layers = layers,
          .heads = heads,
          .ffn = 4 * dim,
          .vocab = 50257,
          .positions = 1024,
          .tied = true};
}

ModelSpec vgg(std::vector<std::int64_t> convolutions) {
  return {.type = ModelType::vgg, .dropout = 0.5, .convolutions = std::move(convolutions)};
}

std::vector<std::int64_t> vgg16(std::int64_t w) {
  return {w, w, 0, 2 * w, 2 * w, 0, 4 * w, 4 * w, 4 * w, 0, 8 * w, 8 * w, 8 * w, 0, 8 * w, 8 * w, 8 * w, 0};
}

const std::map<std::string, ModelSpec, std::less<>>& published() {
  static const std::map<std::string, ModelSpec, std::less<>> models{
      {"gpt2-124m", gpt2(768, 12, 12)},
      {"gpt2-355m", gpt2(1024, 24, 16)},
      {"gpt2-774m", gpt2(1280, 36, 20)},
      {"gpt2-1558m", gpt2(1600, 48, 25)},
      {"llama2-7b", llama({.dim = 4096, .layers = 32, .heads = 32, .ffn = 11008, .vocab = 32000, .positions = 4096})},
      {"llama2-13b", llama({.dim = 5120, .layers = 40, .heads = 40, .ffn = 13824, .vocab = 32000, .positions = 4096})},
      {"llama2-70b",
       llama({.dim = 8192, .layers = 80, .heads = 64, .kv_heads = 8, .ffn = 28672, .vocab = 32000, .positions = 4096})},
      {"llama3-8b", llama({.dim = 4096,
                           .layers = 32,
                           .heads = 32,
                           .kv_heads = 8,
                           .ffn = 14336,
                           .vocab = 128256,
                           .positions = 8192,
                           .rope_theta = 500000})},
      {"llama3-70b", llama({.dim = 8192,
                            .layers = 80,
                            .heads = 64,
                            .kv_heads = 8,
                            .ffn = 28672,
                            .vocab = 128256,
                            .positions = 8192,
                            .rope_theta = 500000})},
      {"vgg11", vgg({64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0})},
      {"vgg13", vgg({64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0})},
      {"vgg16", vgg(vgg16(64))},
      {"vgg19", vgg({64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0})}};
  return models;
}

void positive(const char* key, std::int64_t value) {
  if (value < 1) fail_config("model.{} is {}; it must be at least 1", key, value);
}

void resolve_attention(ModelSpec& spec) {
  positive("heads", spec.heads);
  positive("positions", spec.positions);
  if (spec.head_dim < 0) fail_config("model.head_dim is {}; it must be at least 1, or 0 for dim / heads", spec.head_dim);
  if (!spec.head_dim && spec.dim % spec.heads)
    fail_config("model.heads is {}, which does not divide model.dim = {}", spec.heads, spec.dim);
  if (!spec.head_dim) spec.head_dim = spec.dim / spec.heads;
  if (!spec.kv_heads) spec.kv_heads = spec.heads;
  if (spec.kv_heads < 0 || spec.heads % spec.kv_heads)
    fail_config("model.kv_heads is {}, which does not divide model.heads = {}", spec.kv_heads, spec.heads);
  if (spec.type == ModelType::llama) {
    if (spec.head_dim % 2)
      fail_config("the size of a head is {} (model.dim = {} over model.heads = {}); rotary positions need an even one",
                  spec.head_dim, spec.dim, spec.heads);
    if (!(spec.rope_theta > 0)) fail_config("model.rope_theta is {}; it must be above 0", spec.rope_theta);
  } else {
    if (spec.kv_heads != spec.heads)
      fail_config("model.kv_heads is {}; gpt2 has as many as model.heads = {}", spec.kv_heads, spec.heads);
    if (spec.head_dim * spec.heads != spec.dim)
      fail_config("model.head_dim is {}; gpt2 needs model.dim / model.heads = {}", spec.head_dim, spec.dim / spec.heads);
  }
}

void resolve_vgg(ModelSpec& spec) {
  positive("width", spec.width);
  if (spec.convolutions.empty()) spec.convolutions = vgg16(spec.width);
  if (!spec.ffn) spec.ffn = 64 * spec.width;
  if (spec.tied) fail_config("model.tied is true; vgg has no embedding to tie");
  positive("image", spec.image);
  positive("channels", spec.channels);
  positive("classes", spec.classes);
  positive("pool", spec.pool);
  std::int64_t side = spec.image;
  for (const std::int64_t channels : spec.convolutions) {
    if (channels < 0)
      fail_config("model.convolutions holds {}; an entry is a number of channels, or 0 for a pooling", channels);
    if (!channels) side /= 2;
  }
  if (!spec.convolutions[0]) fail_config("model.convolutions starts with a pooling; it must start with a convolution");
  if (side < 1)
    fail_config("model.image is {}, too small for the {} poolings of model.convolutions", spec.image,
                std::count(spec.convolutions.begin(), spec.convolutions.end(), 0));
}

}  // namespace

const char* name_of(ModelType type) {
  for (const auto& [name, value] : kTypes)
    if (value == type) return name.c_str();
  return "unknown";
}

ModelType model_type(std::string_view name) {
  if (const auto found = kTypes.find(name); found != kTypes.end()) return found->second;
  fail_config("model.type is \"{}\"; it must be llama, gpt2, vgg or mlp", name);
}

std::vector<std::string> published_model_names() {
  std::vector<std::string> names;
  for (const auto& [name, spec] : published()) names.push_back(name);
  return names;
}

ModelSpec published_model(std::string_view name) {
  if (const auto found = published().find(name); found != published().end()) return found->second;
  fail_config("\"{}\" is no published model; known are {}", name, fmt::join(published_model_names(), ", "));
}

ModelSpec resolve(const ModelSpec& given) {
  ModelSpec spec = given;
  const auto& adapter = spec.adapter;
  if (adapter.rank < 0) fail_config("adapter.rank is {}; it must be at least 1, or 0 for no adapters", adapter.rank);
  if (!(adapter.alpha > 0)) fail_config("adapter.alpha is {}; it must be above 0", adapter.alpha);
  if (!(adapter.dropout >= 0 && adapter.dropout < 1))
    fail_config("adapter.dropout is {}; it must be in [0, 1)", adapter.dropout);
  if (spec.reversible && spec.type != ModelType::llama && spec.type != ModelType::gpt2)
    fail_config("model.reversible is true; {} has no blocks of two parts. Allowed with: llama | gpt2", name_of(spec.type));
  if (!(spec.dropout >= 0 && spec.dropout < 1)) fail_config("model.dropout is {}; it must be in [0, 1)", spec.dropout);
  if (spec.ffn < 0) fail_config("model.ffn is {}; it must be at least 1, or 0 for the usual width", spec.ffn);
  if (spec.type == ModelType::vgg) {
    resolve_vgg(spec);
    return spec;
  }
  positive("dim", spec.dim);
  positive("layers", spec.layers);
  if (!spec.ffn) spec.ffn = 4 * spec.dim;
  if (!(spec.norm_eps > 0)) fail_config("model.norm_eps is {}; it must be above 0", spec.norm_eps);
  if (spec.type == ModelType::mlp) {
    if (spec.inputs < 0) fail_config("model.inputs is {}; it must be at least 1, or 0 for tokens", spec.inputs);
    if (spec.inputs) positive("classes", spec.classes);
    if (spec.inputs && spec.tied) fail_config("model.tied is true; an mlp of vectors has no embedding to tie");
  } else {
    resolve_attention(spec);
  }
  if (!spec.inputs) positive("vocab", spec.vocab);
  return spec;
}

std::int64_t ParameterDescription::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::int64_t UnitDescription::parameter_elements() const {
  std::int64_t sum = 0;
  for (const auto& parameter : parameters) sum += parameter.elements();
  return sum;
}

double UnitDescription::forward_flops(std::int64_t sequence) const {
  // A causal token at position p attends to p + 1 positions: (sequence + 1) / 2 on average.
  return product_flops + attention_flops_per_position * (static_cast<double>(sequence) + 1) / 2;
}

std::int64_t UnitDescription::activation_bytes(std::int64_t element_bytes) const {
  return (saved_elements + (element_bytes == 4 ? 0 : saved_casts)) * element_bytes + saved_statistics * 4;
}

std::int64_t ModelDescription::parameter_elements() const {
  std::int64_t sum = 0;
  for (const auto& unit : units) sum += unit.parameter_elements();
  return sum;
}

std::vector<std::string> chain_of(const ModelDescription& model) {
  std::vector<std::string> names;
  for (const auto& unit : model.units)
    if (unit.kind != UnitKind::root) names.push_back(unit.name);
  return names;
}

ModelDescription part_of(const ModelDescription& model, int begin, int end) {
  ModelDescription part{.spec = model.spec, .units = {}, .constant_bytes = model.constant_bytes, .tensor = model.tensor};
  int number = 0;
  bool shares = false;
  for (const auto& unit : model.units) {
    if (unit.kind == UnitKind::root) continue;
    const bool inside = number >= begin && number < end;
    ++number;
    if (!inside) continue;
    shares = shares || !unit.shared.empty();
    part.units.push_back(unit);
  }
  require(begin >= 0 && begin < end && end <= number, "Units {}..{} of a model that has {}", begin, end - 1, number);
  for (const auto& unit : model.units)
    if (unit.kind == UnitKind::root && shares) part.units.insert(part.units.begin(), unit);
  return part;
}

const UnitDescription& ModelDescription::unit(std::string_view name) const {
  for (const auto& unit : units)
    if (unit.name == name) return unit;
  fail("the model has no Unit \"{}\"", name);
}

}  // namespace bonfire::plan
