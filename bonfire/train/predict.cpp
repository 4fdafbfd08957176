#include "bonfire/train/predict.h"

#include <algorithm>

namespace bonfire {
namespace {

plan::Compression compression_of(const std::string& name) {
  if (name == "bf16") return plan::Compression::bf16;
  if (name == "fp16") return plan::Compression::fp16;
  return name == "powersgd" ? plan::Compression::powersgd : plan::Compression::none;
}

std::int64_t optimizer_states(const Config::Optimizer& optimizer) {
  if (optimizer.type == "sgd") return optimizer.momentum != 0 ? 1 : 0;
  return optimizer.amsgrad ? 3 : 2;
}

std::int64_t tokens_per_sample(const Config& config) { return config.reads_tokens() ? config.data.sequence : 1; }

// Elements per token of the largest gradient of something inside a Unit that exists beside all that forward has kept.
std::int64_t working_elements(const plan::ModelDescription& model) {
  const auto& spec = model.spec;
  if (spec.type == plan::ModelType::llama) return 2 * spec.ffn;  // gate and up are one product
  if (spec.type != plan::ModelType::vgg) return spec.ffn;
  std::int64_t largest = 0;
  for (const auto& unit : model.units) largest = std::max(largest, unit.saved_elements);
  return largest;
}

// Input and target of one sample.
std::int64_t sample_bytes(const Config& config) {
  const auto& spec = config.model.spec;
  if (config.reads_tokens()) return 2 * 8 * config.data.sequence;
  return 8 + 4 * (config.model.type == "vgg" ? spec.channels * spec.image * spec.image : spec.inputs);
}

}  // namespace

plan::DataParallel data_parallel_of(const Config& config) {
  constexpr double mebibyte = 1 << 20;
  return {.replicate = static_cast<int>(config.layout.replicate),
          .buckets = {.bucket_bytes = static_cast<std::int64_t>(config.layout.bucket_mb * mebibyte),
                      .first_bucket_bytes = static_cast<std::int64_t>(config.layout.first_bucket_mb * mebibyte)},
          .compression = compression_of(config.layout.compression),
          .powersgd_rank = static_cast<int>(config.layout.powersgd_rank)};
}

MemoryPrediction predict_memory(const Config& config) {
  const auto model = plan::describe(config.model.spec);
  const auto layout = data_parallel_of(config);
  std::int64_t all = 0, trained = 0;  // elements, with padding
  for (const auto& flat : plan::flats_of(model, layout)) {
    for (const auto& region : flat.regions) all += region.elements;
    trained += flat.trained_elements();
  }
  constexpr std::int64_t master_bytes = 4;
  const std::int64_t compute_bytes = config.train.precision == "fp32" ? 4 : 2;

  MemoryPrediction bytes;
  bytes.parameters = all * compute_bytes + (compute_bytes == master_bytes ? 0 : trained * master_bytes);
  bytes.gradients = trained * master_bytes;
  bytes.optimizer = optimizer_states(config.optimizer) * trained * master_bytes;
  if (layout.replicate > 1 && layout.compression != plan::Compression::none) {
    bytes.communication = trained * (layout.compression == plan::Compression::powersgd ? master_bytes : 2);
  }
  for (const auto& unit : model.units) bytes.activations += unit.activation_bytes(compute_bytes);
  bytes.activations += working_elements(model) * compute_bytes;
  bytes.activations *= config.train.microbatch * tokens_per_sample(config);
  // The step in use and the two that the loader reads ahead.
  bytes.data = 3 * config.train.batch / config.data_ranks() * sample_bytes(config);
  return bytes;
}

double step_flops(const Config& config) {
  double forward = 0;
  for (const auto& unit : plan::describe(config.model.spec).units) {
    forward += unit.forward_flops(config.reads_tokens() ? config.data.sequence : 0);
  }
  return 3 * forward * static_cast<double>(config.train.batch * tokens_per_sample(config));
}

std::optional<double> peak_flops(const std::string& gpu, const std::string& precision) {
  struct Peak {
    const char* name;
    double half;  // fp16 and bf16
    double full;  // fp32
  };
  static constexpr Peak peaks[] = {
      {"H200", 989e12, 67e12}, {"H100", 989e12, 67e12}, {"A100", 312e12, 19.5e12}, {"V100", 125e12, 15.7e12}};
  for (const auto& peak : peaks) {
    if (gpu.find(peak.name) != std::string::npos) return precision == "fp32" ? peak.full : peak.half;
  }
  return std::nullopt;
}

}  // namespace bonfire
