#include "bonfire/train/engine_options.h"

#include <utility>
#include <variant>

#include "bonfire/models/precision.h"
#include "bonfire/nn/host_inputs.h"
#include "bonfire/shard/share.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

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

}  // namespace

ShardOptions engine_options(const Config& config, const Log& log, int tensor_rank) {
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
  if (config.layout.pipeline == 1 || gathers_units(config))
    options.reshard_after_forward = layout.reshard_ranks > 0 ? ReshardAfterForward(layout.reshard_ranks)
                                                             : ReshardAfterForward(layout.reshard_after_forward);
  auto& precision = options.precision;
  if (layout.compute != layout.master) precision.parameters = scalar_type(layout.compute);
  if (layout.gradient != layout.master) precision.gradients = scalar_type(layout.gradient);
  if (layout.keep) precision.keep = [keep = layout.keep](const std::string& name, const at::Tensor&) { return keep(name); };
  if (layout.scales)
    precision.scales = [scales = layout.scales](const std::string& name, const at::Tensor& parameter) {
      return scales(name, parameter.sizes().vec());
    };
  if (const auto& type = config.train.output_precision; type != "model")
    precision.outputs = scalar_type(plan::dtype_of(type));
  if (const auto& type = config.train.buffer_precision; type != "model")
    precision.buffers = scalar_type(plan::dtype_of(type));
  precision.scaled_loss = config.train.precision == "fp16";
  options.wrapping = wrapping_of(config);
  if (auto placements = placements_of(config, tensor_rank))
    options.placement = [placements = std::move(placements)](const std::string& name, const at::Tensor&) {
      return placements(name);
    };
  return options;
}

BuildOptions build_options(const Config& config, const World& world, const Mesh& mesh) {
  return {.seed = static_cast<std::uint64_t>(config.train.seed),
          .device = world.device(),
          .tensor = {.group = mesh.group(Axis::tensor),
                     .sequence = tensor_part_of(config).sequence,
                     .chunks = tensor_part_of(config).chunks},
          .context = {.group = mesh.group(Axis::context),
                      .way = config.layout.context_attention == "heads" ? ContextWay::heads : ContextWay::ring},
          .host_inputs = config.layout.recompute_offload ? std::make_shared<HostInputs>() : nullptr};
}

bool has_faulty_loss(const Config& config, const World& world) {
  return config.fault.nan_rank / config.layout.tensor == world.rank() / config.layout.tensor;
}

void prepare_blocks(Model& model, const Config& config) {
  keep_for_backward(model, kept_of(config));
  const auto& train = config.train;
  if (train.precision != "fp8") return;
  use_fp8(model, {.scaling = train.fp8_scaling == "current" ? Fp8Scaling::current : Fp8Scaling::delayed,
                  .scales = train.fp8_scales == "row" ? Fp8Scales::row : Fp8Scales::tensor});
}

std::unique_ptr<Optimizer> make_optimizer(Shares& shares, const Config& config) {
  const auto& o = config.optimizer;
  if (o.type == "sgd") {
    return std::make_unique<Sgd>(shares, SgdOptions{.lr = o.lr,
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
  if (o.type == "adam") return std::make_unique<Adam>(shares, options);
  return std::make_unique<AdamW>(shares, options);
}

}  // namespace bonfire
