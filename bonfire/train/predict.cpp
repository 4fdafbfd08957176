#include "bonfire/train/predict.h"

#include "bonfire/comm/device.h"

namespace bonfire {
namespace {

plan::Compression compression_of(const std::string& name) {
  if (name == "bf16") return plan::Compression::bf16;
  if (name == "fp16") return plan::Compression::fp16;
  return name == "powersgd" ? plan::Compression::powersgd : plan::Compression::none;
}

int optimizer_states(const Config::Optimizer& optimizer) {
  if (optimizer.type == "sgd") return optimizer.momentum != 0 ? 1 : 0;
  return optimizer.amsgrad ? 3 : 2;
}

std::int64_t tokens_per_sample(const Config& config) { return config.reads_tokens() ? config.data.sequence : 1; }

// Input and target of one sample.
std::int64_t sample_bytes(const Config& config) {
  const auto& spec = config.model.spec;
  if (config.reads_tokens()) return 2 * 8 * config.data.sequence;
  return 8 + 4 * (config.model.type == "vgg" ? spec.channels * spec.image * spec.image : spec.inputs);
}

}  // namespace

plan::DataParallel data_parallel_of(const Config& config) {
  constexpr double mebibyte = 1 << 20;
  const std::int64_t samples = config.train.batch / config.data_ranks();  // of one rank
  return {.replicate = static_cast<int>(config.layout.replicate),
          .shard = static_cast<int>(config.layout.shard),
          .what = plan::sharded_of(config.layout.sharded),
          .microbatches = static_cast<int>(samples / config.train.microbatch),
          .compute = plan::dtype_of(config.train.precision),
          .buckets = {.bucket_bytes = static_cast<std::int64_t>(config.layout.bucket_mb * mebibyte),
                      .first_bucket_bytes = static_cast<std::int64_t>(config.layout.first_bucket_mb * mebibyte)},
          .compression = compression_of(config.layout.compression),
          .powersgd_rank = static_cast<int>(config.layout.powersgd_rank),
          .clip = config.train.clip > 0};
}

plan::MemoryOptions memory_options_of(const Config& config) {
  const bool on_cpu = config.run.device == "cpu" || (config.run.device == "auto" && !gpu_available());
  return {.optimizer_states = optimizer_states(config.optimizer),
          .tokens = config.train.microbatch * tokens_per_sample(config),
          // The step in use and the two that the loader reads ahead.
          .data_bytes = 3 * config.train.batch / config.data_ranks() * sample_bytes(config),
          .receives_apart = on_cpu};
}

plan::Memory predict_memory(const Config& config) {
  return plan::memory_of(plan::describe(config.model.spec), data_parallel_of(config), memory_options_of(config));
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
