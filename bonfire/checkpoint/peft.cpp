#include "bonfire/checkpoint/peft.h"

#include <algorithm>
#include <span>
#include <system_error>

#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/base/look.h"
#include "bonfire/base/output_file.h"
#include "bonfire/checkpoint/safetensors.h"
#include "bonfire/checkpoint/scalar_types.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// What changes the function in ways that ours does not have: absent, null, false and empty are fine.
void require_off(const Json& config, const char* key) {
  const auto value = config.find(key);
  if (!value || value->is_null()) return;
  bool off = false;
  try {
    off = !value->boolean();
  } catch (const ConfigError&) {
    try {
      off = value->items().empty();
    } catch (const ConfigError&) {
      off = value->members().empty();
    }
  }
  if (!off) value->refuse(fmt::format("{} is not available; allowed: plain LoRA, without it", key));
}

// A list of names, or one pattern, which PEFT takes for a regular expression.
std::vector<std::string> names_in(const Json& value) {
  if (value.is_string()) return {value.string()};
  std::vector<std::string> names;
  for (const auto& item : value.items()) names.push_back(item.string());
  return names;
}

}  // namespace

PeftAdapters read_peft(const fs::path& folder) {
  const Json config = read_json(folder / peft_config_name);
  PeftAdapters adapters;
  if (const auto type = config.at("peft_type"); type.string() != "LORA")
    type.refuse(fmt::format("peft_type is \"{}\"; allowed: LORA", type.string()));
  for (const char* key :
       {"use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "megatron_config",
        "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "lora_bias"})
    require_off(config, key);
  if (const auto bias = config.find("bias"); bias && bias->is_string() && bias->string() != "none")
    bias->refuse(fmt::format("bias is \"{}\"; allowed: none", bias->string()));
  adapters.rank = config.at("r").integer();
  adapters.alpha = config.at("lora_alpha").number();
  if (const auto dropout = config.find("lora_dropout")) adapters.dropout = dropout->number();
  if (const auto names = config.find("target_modules"); names && !names->is_null()) adapters.layers = names_in(*names);
  if (const auto base = config.find("base_model_name_or_path"); base && base->is_string()) adapters.base = base->string();
  if (const auto transposed = config.find("fan_in_fan_out")) adapters.transposed = transposed->boolean();

  const SafetensorsFile file((folder / peft_weights_name).string());
  for (const auto& stored : file.tensors()) {
    PeftTensor tensor{.name = stored.name, .values = at::empty(stored.shape, scalar_type(stored.type))};
    file.read(stored, 0, std::span(static_cast<std::byte*>(tensor.values.mutable_data_ptr()), tensor.values.nbytes()));
    adapters.tensors.push_back(std::move(tensor));
  }
  return adapters;
}

void write_peft(const fs::path& folder, const PeftAdapters& adapters) {
  if (is_there(folder)) fail_config("'{}' exists already; allowed: a folder that does not", folder.string());
  std::error_code refused;
  fs::create_directories(folder, refused);
  if (refused) fail_config("'{}' cannot be made: {}", folder.string(), refused.message());
  std::vector<StoredTensor> stored;
  for (const auto& [name, values] : adapters.tensors)
    stored.push_back({.name = name, .type = stored_type(values.scalar_type()), .shape = values.sizes().vec()});
  SafetensorsWriter writer(folder / peft_weights_name, stored, {{"format", "pt"}});
  for (const auto& tensor : adapters.tensors) {
    const at::Tensor values = tensor.values.contiguous();
    writer.append(std::span(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()));
  }
  writer.commit();
  const nlohmann::ordered_json config{{"peft_type", "LORA"},
                                      {"task_type", "CAUSAL_LM"},
                                      {"base_model_name_or_path", adapters.base},
                                      {"r", adapters.rank},
                                      {"lora_alpha", adapters.alpha},
                                      {"lora_dropout", adapters.dropout},
                                      {"target_modules", adapters.layers},
                                      {"fan_in_fan_out", adapters.transposed},
                                      {"bias", "none"},
                                      {"modules_to_save", nullptr},
                                      {"init_lora_weights", true},
                                      {"inference_mode", true}};
  write_file(folder / peft_config_name, config.dump(2) + "\n");
}

}  // namespace bonfire
