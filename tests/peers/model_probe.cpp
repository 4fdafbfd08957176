#include "tests/peers/probes.h"

#include <filesystem>
#include <fstream>

#include <ATen/ops/arange.h>
#include <nlohmann/json.hpp>

#include "bonfire/models/model.h"

namespace bonfire::peers {

// Every shape that can be told apart from the others: fewer heads of keys than of queries, tied and untied.
plan::ModelSpec probe_spec(const std::string& name) {
  plan::ModelSpec spec;
  spec.type = name.starts_with("llama") ? plan::ModelType::llama : plan::ModelType::gpt2;
  spec.dim = 48;
  spec.layers = 3;
  spec.heads = 6;
  spec.kv_heads = name == "llama" ? 2 : 0;
  spec.ffn = name.starts_with("llama") ? 80 : 0;
  spec.vocab = 101;
  spec.positions = 40;
  spec.tied = name == "gpt2" || name == "llama-tied";
  return spec;
}

void write_raw(const std::filesystem::path& file, const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kDouble).contiguous();
  std::ofstream(file, std::ios::binary)
      .write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
}

nlohmann::json index_of(const plan::ModelSpec& spec) {
  return {
      {"dim", spec.dim},           {"layers", spec.layers}, {"heads", spec.heads},         {"kv_heads", spec.kv_heads},
      {"ffn", spec.ffn},           {"vocab", spec.vocab},   {"positions", spec.positions}, {"rope_theta", spec.rope_theta},
      {"norm_eps", spec.norm_eps}, {"tied", spec.tied}};
}

// In fp64, so that what differs is the function and not the rounding.
void dump_model(const Arguments& arguments) {
  const std::string name = arguments.at(0);
  const std::filesystem::path folder = arguments.at(1);
  const auto spec = plan::resolve(probe_spec(name));
  const auto model = build_model(spec, {.seed = 3, .dtype = at::kDouble});
  const at::Tensor tokens = (at::arange(2 * 33).mul(37) % spec.vocab).view({2, 33});
  const at::Tensor input = tokens.slice(1, 0, 32).contiguous(), target = tokens.slice(1, 1).contiguous();
  const at::Tensor loss = model->forward(input, target);
  loss.backward();

  nlohmann::json index = index_of(spec);
  index["loss"] = loss.item<double>();
  for (const auto& parameter : model->public_parameters()) {
    index["parameters"].push_back({{"name", parameter.name}, {"shape", parameter.tensor.sizes().vec()}});
    write_raw(folder / parameter.name, parameter.tensor);
  }
  write_raw(folder / "input", input);
  write_raw(folder / "target", target);
  write_raw(folder / "logits", model->forward(input));
  double squares = 0;
  for (const auto& parameter : model->parameters()) squares += parameter.grad().pow(2).sum().item<double>();
  index["gradient_norm"] = std::sqrt(squares);
  std::ofstream(folder / "index.json") << index.dump(1);
}

}  // namespace bonfire::peers
