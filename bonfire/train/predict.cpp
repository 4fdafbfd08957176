#include "bonfire/train/predict.h"

#include <algorithm>

#include <ATen/core/dispatch/Dispatcher.h>

#include "bonfire/comm/cores.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/environment.h"
#include "bonfire/kernels/gemm.h"
#include "bonfire/pipeline/pipedream_row.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/train/pipedream_model.h"
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

// What cuBLAS has for a stream, and what the product that runs may have: 32 MiB each, as cuBLAS asks for on Hopper.
constexpr std::int64_t gpu_workspaces = std::int64_t{64} << 20;

// What torch itself asks before it lets oneDNN convolve in two bytes: not every CPU can.
bool library_convolves(plan::Dtype dtype) {
  if (dtype == plan::Dtype::fp32) return true;
  const char* question =
      dtype == plan::Dtype::bf16 ? "mkldnn::_is_mkldnn_bf16_supported" : "mkldnn::_is_mkldnn_fp16_supported";
  return c10::Dispatcher::singleton().findSchemaOrThrow(question, "").typed<bool()>().call();
}

std::int64_t tokens_per_sample(const Config& config) { return config.reads_tokens() ? config.data.sequence : 1; }
// What a rank has of it.
std::int64_t own_tokens_per_sample(const Config& config) { return tokens_per_sample(config) / config.layout.context; }

// Input and target of one sample, and where its documents begin.
std::int64_t sample_bytes(const Config& config) {
  const auto& spec = config.model.spec;
  if (config.reads_tokens()) return (config.data.documents == "separate" ? 3 : 2) * 8 * config.data.sequence;
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
  return {.replicate = static_cast<int>(layout.replicate * layout.context),
          .shard = static_cast<int>(layout.shard),
          .what = layout.shard == 1 ? plan::Sharded::none : plan::sharded_of(layout.sharded),
          .accumulation = layout.accumulation == "full" ? plan::Accumulation::full : plan::Accumulation::sharded,
          .microbatches = static_cast<int>(train.batch / config.data_ranks() / train.microbatch),
          .tokens = train.microbatch * own_tokens_per_sample(config),
          .samples = train.microbatch,
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
          .clip = true,
          .context = {.ranks = static_cast<int>(layout.context),
                      .way = layout.context_attention == "heads" ? plan::ContextWay::heads : plan::ContextWay::ring,
                      .documents = config.data.documents == "separate"}};
}

plan::Served served_of(const Config& config) {
  return {.workers = static_cast<int>(config.data_ranks()),
          .servers = static_cast<int>(config.layout.server),
          .gradient = plan::dtype_of(config.train.gradient_precision),
          .compression = compression_of(config.layout.compression),
          .optimizer_states = optimizer_states(config.optimizer)};
}

plan::DataParallel served_worker_of(const Config& config) {
  auto worker = data_parallel_of(config);
  worker.replicate = worker.shard = 1;
  worker.compression = plan::Compression::none;
  worker.buckets.one_per_group = true;
  return worker;
}

plan::MemoryOptions memory_options_of(const Config& config) {
  const bool on_host = config.run.device == "cpu" || (config.run.device == "auto" && !gpu_available());
  return {.optimizer_states = optimizer_states(config.optimizer),
          .tokens = config.train.microbatch * own_tokens_per_sample(config),
          // The step in use and the two that the loader reads ahead.
          .data_bytes = 3 * config.train.batch / config.data_ranks() * sample_bytes(config),
          .on_host = on_host,
          .own_attention = cpu::prefers_own_gemm(),
          .narrow_convolutions = library_convolves(data_parallel_of(config).compute),
          .threads = threads_per_rank(process_variables(), static_cast<int>(config.ranks()), usable_cores()),
          .workspace_bytes = on_host ? 0 : gpu_workspaces,
          .copies_to_save = (config.checkpoint.asynchronous || !config.checkpoint.drain) && config.checkpoint.every > 0 &&
                            config.checkpoint.every < config.train.steps,
          .learns_order = !config.layout.negotiate_order,
          .inputs_on_host = config.layout.recompute_offload && !on_host,
          // A Unit that is being built does not know its name.
          .built_whole = !config.layout.ignore.empty()};
}

plan::PipelineLayout pipeline_layout_of(const Config& config) {
  plan::PipelineLayout layout{
      .table = table_of(config), .tokens = own_tokens_per_sample(config), .data = data_parallel_of(config)};
  for (const auto& range : stages_of(config, layout.table.stages)) layout.stages.push_back({range.begin, range.end});
  layout.samples.assign(static_cast<std::size_t>(layout.table.microbatches), config.train.microbatch);
  layout.gathers_units = gathers_units(config);
  return layout;
}

namespace {

// A version leaves what is frozen as it is, but for what shares a buffer with something that is trained.
void keep_versions(plan::ModelState& state, const std::vector<plan::FlatLayout>& flats, int versions) {
  for (const auto& flat : flats) {
    if (versions == 1 || !flat.any_trained()) continue;
    state.parameters += flat.bytes * (versions - 1);
    // Masters lie apart of what forward reads, rounded or not.
    for (const auto& region : flat.regions)
      if (region.trained && region.codec() == plan::Codec::same)
        state.masters += region.elements * plan::bytes_of(region.master);
  }
}

}  // namespace

// A rank of each stage in a full pipeline, with the versions that it keeps.
std::vector<PredictedStage> predict_stages(const Config& config) {
  const auto options = memory_options_of(config);
  const auto model = model_of(config);
  const auto robin = robin_of(config);
  plan::PipelineLayout layout{
      .table = pipedream_table(robin), .tokens = tokens_per_sample(config), .data = data_parallel_of(config)};
  for (const auto& range : stages_of(config, layout.table.stages)) layout.stages.push_back({range.begin, range.end});
  layout.samples.assign(static_cast<std::size_t>(layout.table.microbatches), config.train.microbatch);
  layout.sent_window = PipeDreamRow(robin, 0, 1).window();
  std::vector<PredictedStage> stages;
  for (int number = 0; number < layout.table.stages; ++number) {
    const auto& units = layout.stages[static_cast<std::size_t>(number)];
    const int replicas = robin.replicas[static_cast<std::size_t>(number)];
    layout.data.replicate = replicas;
    PredictedStage stage{.first_unit = units.begin,
                         .units = units.end - units.begin,
                         .replicas = replicas,
                         .in_flight = schedule::in_flight(robin, number)};
    const auto flats = plan::flats_of_stage(model, layout, number);
    if (std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat.any_trained(); }))
      stage.versions = schedule::most_versions(robin, number);
    if (!config.layout.stash) stage.versions = std::min(stage.versions, 2);
    stage.memory = plan::memory_of(model, layout, options, robin.first_rank(number));
    keep_versions(stage.memory.state, flats, stage.versions);
    stages.push_back(stage);
  }
  return stages;
}

Config beside_data_parallel(const Config& config) {
  Config beside = config;
  beside.layout = {};
  beside.layout.replicate = config.ranks();
  beside.layout.recompute = config.layout.recompute;
  beside.layout.recompute_every = config.layout.recompute_every;
  beside.layout.recompute_offload = config.layout.recompute_offload;
  const auto all = config.ranks() * config.train.microbatch;
  beside.train.batch = (config.train.batch + all - 1) / all * all;
  return beside;
}

plan::Memory predict_memory(const Config& config) {
  if (runs_pipedream(config)) {
    const auto stages = predict_stages(config);
    return std::max_element(stages.begin(), stages.end(),
                            [](const auto& a, const auto& b) { return a.memory.total() < b.memory.total(); })
        ->memory;
  }
  auto options = memory_options_of(config);
  if (config.layout.server > 0) {
    options.optimizer_states = 0;
    options.copies_to_save = false;
    return plan::memory_of(wrapped_model_of(config), served_worker_of(config), options);
  }
  if (config.layout.pipeline == 1) return plan::memory_of(wrapped_model_of(config), data_parallel_of(config), options);
  return plan::memory_of(model_of(config), pipeline_layout_of(config), options);
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
