#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

// Low-rank adapters as the library PEFT keeps them: adapter_config.json and adapter_model.safetensors in one folder.
namespace bonfire {

inline constexpr const char* peft_config_name = "adapter_config.json";
inline constexpr const char* peft_weights_name = "adapter_model.safetensors";

struct PeftTensor {
  std::string name;  // "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
  at::Tensor values;
};

struct PeftAdapters {
  std::int64_t rank = 8;
  double alpha = 8;
  double dropout = 0;
  std::vector<std::string> layers{};  // that have one: their names, or ends of them
  std::string base{};                 // what the base model is called
  bool transposed = false;            // the base's weights are [in, out]
  std::vector<PeftTensor> tensors{};
};

// `layers` is what the file says, not which there are. Throws ConfigError that names what is wrong, and for adapters that
// are not plain LoRA.
BONFIRE_API PeftAdapters read_peft(const std::filesystem::path& folder);
// Throws ConfigError where the folder exists already, WriteError.
BONFIRE_API void write_peft(const std::filesystem::path& folder, const PeftAdapters& adapters);

}  // namespace bonfire
