#include "bonfire/train/build.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/train/capturable.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/staged_model.h"
#include "bonfire/train/whole_model.h"

namespace bonfire {
namespace {

MeshShape mesh_shape(const Config& config) {
  const auto& layout = config.layout;
  return {.pipeline = static_cast<int>(config.pipeline_ranks()),
          .replicate = static_cast<int>(layout.replicate),
          .shard = static_cast<int>(layout.shard),
          .context = static_cast<int>(layout.context),
          .tensor = static_cast<int>(layout.tensor)};
}

// What is settled on the way is put into the configuration.
std::unique_ptr<Trainee> make_trainee(const World& world, Config& config, const Mesh& mesh, const RunData& data) {
  if (runs_pipedream(config)) return std::make_unique<PipeDreamModel>(world, config, mesh, *data.train);
  if (config.layout.pipeline > 1) {
    settle_stages(config, world, mesh, *data.train);
    return std::make_unique<StagedModel>(world, config, mesh, *data.train);
  }
  return std::make_unique<WholeModel>(world, config, mesh);
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
  const int capability = 10 * gpu.major + gpu.minor;
  const auto needs = [&](int least, const char* allowed) {
    if (capability >= least) return;
    fail_key(config, "train.precision",
             fmt::format("{} has compute capability {}.{}, {} needs {}.{}; allowed on it: {}", gpu.name, gpu.major,
                         gpu.minor, config.train.precision, least / 10, least % 10, allowed));
  };
  if (config.train.precision == "bf16") needs(80, "fp32 | fp16");
  if (config.train.precision == "fp8") needs(89, capability >= 80 ? "fp32 | bf16 | fp16" : "fp32 | fp16");
}

c10::Device device_of(const Config& config, int local_rank) {
  const std::string& asked = config.run.device;
  if (asked == "cpu" || (asked == "auto" && !gpu_available())) {
    wants_graphs(config, c10::kCPU);
    return c10::kCPU;
  }
  if (!gpu_available()) fail_key(config, "run.device", gpu_unavailable_reason() + "; allowed here: auto | cpu");
  const int index = local_rank % gpu_count();
  require_precision(config, gpu_info(index));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

ComputeStream::ComputeStream(c10::Device device) {
  if (!device.is_cpu()) guard_.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
}

Run::Run(const World& a_world, const Config& a_config)
    : world(a_world),
      config(a_config),
      stream(world.device()),
      memory(world.device()),
      cap(world.device(), config.run.memory_cap.count),
      // The one who started the ranks, or the first of each machine, has read all tokens.
      data(open_data(config)),
      mesh(world.mesh(mesh_shape(config))),
      groups(DataGroups::of_stage(mesh)),
      trainee(make_trainee(world, config, mesh, data)),
      scaler(make_scaler(config)),
      learning_rate(learning_rate_of(config)),
      loader(data.train, loader_options(config, mesh, world.device())) {
  // Two runs of one layout give equal bits on a GPU too, but for attention in bf16 and fp16.
  if (!world.device().is_cpu()) make_deterministic();
}

WholeModel& Run::whole() const {
  auto* const model = dynamic_cast<WholeModel*>(trainee.get());
  require(model, "no rank of a pipeline has the whole model");
  return *model;
}

}  // namespace bonfire
