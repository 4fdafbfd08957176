#include "bonfire/train/build.h"

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/models/model.h"
#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/share.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

MeshShape mesh_shape(const Config::Layout& layout) {
  return {.pipeline = static_cast<int>(layout.pipeline),
          .replicate = static_cast<int>(layout.replicate),
          .shard = static_cast<int>(layout.shard),
          .context = static_cast<int>(layout.context),
          .tensor = static_cast<int>(layout.tensor)};
}

// The types of Units that layout.wrap_types' words stand for.
Wrapping wrapping_of(const Config& config) {
  const auto& layout = config.layout;
  const auto& spec = config.model.spec;
  Wrapping wrapping{.all_in_one = layout.wrap == WordOrNumber("all"), .ignored_parameters = ignored_parameters(config)};
  if (const auto* least = std::get_if<std::int64_t>(&layout.wrap)) wrapping.min_parameters = *least;
  for (const auto& type : layout.wrap_types) {
    if (type == "embedding") wrapping.types.push_back(spec.inputs ? "VectorEmbedding" : "TokenEmbedding");
    if (type == "head") wrapping.types.push_back("OutputHead");
    if (type != "block") continue;
    switch (spec.type) {
      case plan::ModelType::llama:
      case plan::ModelType::gpt2: wrapping.types.push_back("TransformerBlock"); break;
      case plan::ModelType::mlp: wrapping.types.push_back("MlpBlock"); break;
      case plan::ModelType::vgg: wrapping.types.insert(wrapping.types.end(), {"Convolution", "Classifier"}); break;
    }
  }
  return wrapping;
}

ShardOptions engine_options(const Config& config, const Log& log) {
  // The same numbers as the prediction's.
  const auto layout = data_parallel_of(config);
  ShardOptions options{.what = layout.what,
                       .prefetch = layout.prefetch,
                       .backward_prefetch = layout.backward_prefetch,
                       .accumulation = layout.accumulation,
                       .offload = layout.offload,
                       .start = config.train.start == "broadcast" ? Start::broadcast : Start::check,
                       .buckets = layout.buckets,
                       .reduction = {.compression = layout.compression, .powersgd_rank = layout.powersgd_rank},
                       .negotiate_order = config.layout.negotiate_order,
                       .debug = config.run.debug_parameters,
                       .log = log};
  options.reshard_after_forward = layout.reshard_ranks > 0 ? ReshardAfterForward(layout.reshard_ranks)
                                                           : ReshardAfterForward(layout.reshard_after_forward);
  auto& precision = options.precision;
  if (layout.compute != layout.master) precision.parameters = scalar_type(layout.compute);
  if (layout.gradient != layout.master) precision.gradients = scalar_type(layout.gradient);
  if (layout.keep) precision.keep = [keep = layout.keep](const std::string& name, const at::Tensor&) { return keep(name); };
  if (const auto& type = config.train.output_precision; type != "model")
    precision.outputs = scalar_type(plan::dtype_of(type));
  if (const auto& type = config.train.buffer_precision; type != "model")
    precision.buffers = scalar_type(plan::dtype_of(type));
  precision.scaled_loss = config.train.precision == "fp16";
  options.wrapping = wrapping_of(config);
  return options;
}

// Unit by Unit: a rank never holds more of the model than its shares and the Unit that is being built. A Unit that is being
// built does not know its name, so with names to be ignored the model is built whole.
std::shared_ptr<Model> make_model(const Config& config, const Mesh& mesh, const World& world) {
  std::optional<Build> scope;
  if (config.layout.ignore.empty()) scope.emplace(mesh, engine_options(config, world.log()));
  return build_model(model_of(config), {.seed = static_cast<std::uint64_t>(config.train.seed), .device = world.device()});
}

std::vector<ParameterRule> rules_of(const Config& config) {
  const auto& optimizer = config.optimizer;
  auto names = names_of_groups(config);
  std::vector<ParameterRule> rules;
  for (std::size_t at = 0; at < names.size(); ++at) {
    const auto& [match, lr, weight_decay] = optimizer.group[at];
    rules.push_back({.matches = [names = std::move(names[at])](const std::string& name,
                                                               const at::Tensor&) { return names.contains(name); },
                     .lr_factor = lr && optimizer.lr > 0 ? *lr / optimizer.lr : 1,
                     .weight_decay = weight_decay.value_or(optimizer.weight_decay)});
  }
  return rules;
}

std::unique_ptr<Optimizer> make_optimizer(Engine& engine, const Config& config) {
  const auto& o = config.optimizer;
  if (o.type == "sgd") {
    return std::make_unique<Sgd>(engine, SgdOptions{.lr = o.lr,
                                                    .momentum = o.momentum,
                                                    .weight_decay = o.weight_decay,
                                                    .nesterov = o.nesterov,
                                                    .maximize = o.maximize,
                                                    .rules = rules_of(config)});
  }
  const AdamOptions options{.lr = o.lr,
                            .beta1 = o.betas[0],
                            .beta2 = o.betas[1],
                            .eps = o.eps,
                            .weight_decay = o.weight_decay,
                            .amsgrad = o.amsgrad,
                            .maximize = o.maximize,
                            .rules = rules_of(config)};
  if (o.type == "adam") return std::make_unique<Adam>(engine, options);
  return std::make_unique<AdamW>(engine, options);
}

std::optional<GradScaler> make_scaler(const Config& config) {
  if (config.train.precision != "fp16") return std::nullopt;
  return GradScaler({.scale = config.optimizer.loss_scale, .growth_interval = config.optimizer.scale_growth_interval});
}

LearningRate learning_rate_of(const Config& config) {
  const auto& o = config.optimizer;
  return {.peak = o.lr,
          .least = o.min_lr,
          .warmup = o.warmup,
          .steps = config.train.steps,
          .decay = o.decay == "cosine" ? Decay::cosine : (o.decay == "linear" ? Decay::linear : Decay::constant)};
}

LoaderOptions loader_options(const Config& config, const Mesh& mesh, c10::Device device) {
  return {.batch = config.train.batch,
          .microbatch = config.train.microbatch,
          .rank = mesh.coordinate(Axis::data),
          .ranks = static_cast<int>(config.data_ranks()),
          .seed = static_cast<std::uint64_t>(config.train.seed),
          .pin_memory = !device.is_cpu()};
}

}  // namespace

void require_precision(const Config& config, const GpuInfo& gpu) {
  if (config.train.precision != "bf16" || gpu.major >= 8) return;
  fail_key(config, "train.precision",
           fmt::format("{} has compute capability {}.{}, bf16 needs 8.0; allowed on it: fp32 | fp16", gpu.name, gpu.major,
                       gpu.minor));
}

c10::Device device_of(const Config& config, int local_rank) {
  const std::string& asked = config.run.device;
  if (asked == "cpu" || (asked == "auto" && !gpu_available())) return c10::kCPU;
  if (!gpu_available()) fail_key(config, "run.device", gpu_unavailable_reason() + "; allowed here: auto | cpu");
  const int index = local_rank % gpu_count();
  require_precision(config, gpu_info(index));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

Run::Run(const World& a_world, const Config& a_config)
    : world(a_world),
      config(a_config),
      memory(world.device()),
      cap(world.device(), config.run.memory_cap.count),
      // The one who started the ranks, or the first of each machine, has read all tokens.
      data(open_data(config, TokenCheck::none)),
      mesh(world.mesh(mesh_shape(config.layout))),
      model(make_model(config, mesh, world)),
      engine(shard(mesh, *model, engine_options(config, world.log()))),
      optimizer(make_optimizer(engine, config)),
      scaler(make_scaler(config)),
      learning_rate(learning_rate_of(config)),
      loader(data.train, loader_options(config, mesh, world.device())) {
  // Two runs of one layout give equal bits on a GPU too.
  if (!world.device().is_cpu()) make_deterministic();
}

}  // namespace bonfire
