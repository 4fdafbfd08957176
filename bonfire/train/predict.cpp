#include "bonfire/train/predict.h"

#include <algorithm>
#include <map>

#include "bonfire/comm/device.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"

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
  const auto& layout = config.layout;
  const auto& train = config.train;
  const auto gradient = plan::dtype_of(train.gradient_precision);
  auto compression = compression_of(layout.compression);
  // Gradients travel in the same numbers to the ranks that keep a share of them and over the replicas.
  auto reduction = train.reduction_precision == "gradient" ? gradient : plan::dtype_of(train.reduction_precision);
  if (compression == plan::Compression::bf16) reduction = plan::Dtype::bf16;
  if (compression == plan::Compression::fp16) reduction = plan::Dtype::fp16;
  if (reduction != gradient && compression == plan::Compression::none)
    compression = reduction == plan::Dtype::bf16 ? plan::Compression::bf16 : plan::Compression::fp16;
  const auto* reshard_ranks = std::get_if<std::int64_t>(&layout.reshard_after_forward);
  return {.replicate = static_cast<int>(layout.replicate),
          .shard = static_cast<int>(layout.shard),
          .what = layout.shard == 1 ? plan::Sharded::none : plan::sharded_of(layout.sharded),
          .accumulation = layout.accumulation == "full" ? plan::Accumulation::full : plan::Accumulation::sharded,
          .microbatches = static_cast<int>(train.batch / config.data_ranks() / train.microbatch),
          .reshard_after_forward = reshard_ranks || std::get<bool>(layout.reshard_after_forward),
          .reshard_ranks = reshard_ranks ? static_cast<int>(*reshard_ranks) : 0,
          .prefetch = static_cast<int>(layout.prefetch),
          .backward_prefetch = layout.backward_prefetch == "after" ? plan::BackwardPrefetch::after_reduction
                                                                   : plan::BackwardPrefetch::before_reduction,
          .offload = plan::offload_of(layout.offload),
          // Between products in fp8 everything is bf16.
          .compute = train.precision == "fp8" ? plan::Dtype::bf16 : plan::dtype_of(train.precision),
          .gradient = gradient,
          .reduction = reduction,
          .keep = kept_in_fp32(config),
          .scales = scales_of_weights(config),
          .buckets = {.bucket_bytes = static_cast<std::int64_t>(layout.bucket_mb * mebibyte),
                      .first_bucket_bytes = static_cast<std::int64_t>(layout.first_bucket_mb * mebibyte)},
          .compression = compression,
          .powersgd_rank = static_cast<int>(layout.powersgd_rank),
          // The step always asks for the norm: it is a column of the metrics, and tells what is not finite.
          .clip = true};
}

plan::MemoryOptions memory_options_of(const Config& config) {
  const bool on_host = config.run.device == "cpu" || (config.run.device == "auto" && !gpu_available());
  return {.optimizer_states = optimizer_states(config.optimizer),
          .tokens = config.train.microbatch * tokens_per_sample(config),
          // The step in use and the two that the loader reads ahead.
          .data_bytes = 3 * config.train.batch / config.data_ranks() * sample_bytes(config),
          .on_host = on_host};
}

namespace {

// What a stage's microbatches keep, in bytes.
struct StageMemory {
  std::int64_t kept = 0;                // from forward for backward
  std::int64_t working = 0;             // the most that a backward has, with what it keeps
  std::int64_t put_off = 0;             // from the first half of a backward for the second: what each product reads
  std::int64_t sent = 0, returned = 0;  // values for the next stage and gradients for the one before, on other ranks
};

std::int64_t put_off_elements(const plan::ModelDescription& part) {
  std::int64_t elements = 0;
  const auto add = [&](const plan::UnitDescription& unit, const std::vector<std::int64_t>& shape) {
    // The rows of an embedding need the gradient alone.
    if (shape.size() == 2) elements += shape[1] + (unit.kind == plan::UnitKind::embedding ? 0 : shape[0]);
  };
  for (const auto& unit : part.units) {
    if (unit.kind != plan::UnitKind::root)
      for (const auto& parameter : unit.parameters) add(unit, parameter.shape);
    for (const auto& shared : unit.shared)
      for (const auto& parameter : part.units.front().parameters)
        if (parameter.name == shared) add(unit, parameter.shape);
  }
  return elements;
}

// The most that a rank's microbatches have at once, cell by cell of its row.
std::int64_t most_in_flight(const std::vector<schedule::Action>& row, const std::map<int, StageMemory>& stages) {
  std::int64_t now = 0, most = 0;
  for (const auto& [stage, kind, microbatch] : row) {
    const auto found = stages.find(stage);
    if (found == stages.end()) continue;
    const auto& of = found->second;
    const auto at_once = [&](std::int64_t more) { most = std::max(most, now + more); };
    switch (kind) {
      case schedule::Kind::forward:
        now += of.kept + of.sent;
        at_once(0);
        break;
      case schedule::Kind::backward:
        at_once(of.working - of.kept + of.returned);
        now += of.returned - of.kept - of.sent;
        break;
      case schedule::Kind::input_gradient:
        at_once(std::max(of.working, of.put_off) - of.kept + of.returned);
        now += of.put_off + of.returned - of.kept - of.sent;
        break;
      case schedule::Kind::weight_gradient: now -= of.put_off; break;
      default: break;
    }
  }
  return most;
}

// The rank of a pipeline that needs most. Its stages are gathered whole, at most two at a time.
plan::Memory predict_pipeline(const Config& config) {
  const auto model = model_of(config);
  const auto table = table_of(config);
  const auto layout = data_parallel_of(config);
  const auto options = memory_options_of(config);
  const auto ranges = stages_of(config, table.stages);
  const schedule::Index index(table);
  const auto rank_of = [&](int stage) { return index.find(schedule::Kind::forward, stage, 0).rank; };
  const std::int64_t element = plan::bytes_of(layout.compute);
  const auto part_at = [&](int stage) {
    const auto& range = ranges[static_cast<std::size_t>(stage)];
    return plan::part_of(model, range.begin, range.end);
  };
  const auto outgoing = [&](int stage) { return part_at(stage).units.back().output_elements * element * options.tokens; };
  plan::Memory most;
  for (int rank = 0; rank < table.ranks(); ++rank) {
    plan::Memory sum;
    std::int64_t largest = 0;
    std::map<int, StageMemory> stages;
    for (int stage = 0; stage < table.stages; ++stage) {
      if (rank_of(stage) != rank) continue;
      const auto part = part_at(stage);
      const auto one = plan::memory_of(part, layout, options);
      sum.state.parameters += one.state.parameters;
      sum.state.masters += one.state.masters;
      sum.state.gradients += one.state.gradients;
      sum.state.optimizer += one.state.optimizer;
      sum.state.host += one.state.host;
      std::int64_t whole = 0;
      for (const auto& flat : plan::flats_of(part, layout)) whole += flat.bytes;
      if (layout.comes_and_goes()) largest = std::max(largest, whole);
      sum.whole_gradients += one.whole_gradients;
      sum.communication = std::max(sum.communication, one.communication);
      sum.data = one.data;
      auto& of = stages[stage];
      of.working = one.activations;
      for (const auto& unit : part.units) of.kept += unit.activation_bytes(element) * options.tokens;
      of.put_off = put_off_elements(part) * element * options.tokens;
      if (stage + 1 < table.stages && rank_of(stage + 1) != rank) of.sent = outgoing(stage);
      // Gloo does not tell when a message has gone; gradients are kept until the end of the step.
      if (options.on_host && stage > 0 && rank_of(stage - 1) != rank) of.returned = outgoing(stage - 1);
    }
    if (stages.empty()) continue;
    sum.gathered = largest * std::min<std::int64_t>(static_cast<std::int64_t>(stages.size()), 2);
    sum.activations = most_in_flight(table.rows[static_cast<std::size_t>(rank)], stages);
    if (sum.total() > most.total()) most = sum;
  }
  return most;
}

}  // namespace

plan::Memory predict_memory(const Config& config) {
  if (config.layout.pipeline > 1) return predict_pipeline(config);
  return plan::memory_of(wrapped_model_of(config), data_parallel_of(config), memory_options_of(config));
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
