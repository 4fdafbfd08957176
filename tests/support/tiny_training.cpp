#include "tests/support/tiny_training.h"

#include <ATen/ATen.h>

#include "bonfire/models/model.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/activations.h"
#include "bonfire/shard/engine.h"

namespace bonfire::testing {
namespace {

constexpr std::int64_t sequence = 8;

}  // namespace

const std::vector<TinyModel>& tiny_models() {
  using plan::ModelType;
  static const std::vector<TinyModel> list{
      {"mlp", {.type = ModelType::mlp, .dim = 16, .layers = 2, .ffn = 24, .vocab = 32}},
      {"vgg", {.type = ModelType::vgg, .ffn = 16, .classes = 5, .image = 8, .pool = 2, .convolutions = {4, 0, 6, 0}}},
      {"gpt2",
       {.type = ModelType::gpt2,
        .dim = 16,
        .layers = 2,
        .heads = 2,
        .ffn = 32,
        .vocab = 32,
        .positions = sequence,
        .tied = true}},
      {"llama",
       {.type = ModelType::llama,
        .dim = 16,
        .layers = 3,
        .heads = 4,
        .kv_heads = 2,
        .ffn = 24,
        .vocab = 32,
        .positions = sequence}},
      {"tied_llama",
       {.type = ModelType::llama,
        .dim = 16,
        .layers = 1,
        .heads = 2,
        .ffn = 24,
        .vocab = 32,
        .positions = sequence,
        .tied = true}},
      {"gpt2_with_dropout",
       {.type = ModelType::gpt2,
        .dim = 16,
        .layers = 2,
        .heads = 2,
        .ffn = 32,
        .vocab = 32,
        .positions = sequence,
        .dropout = 0.2}},
  };
  return list;
}

std::pair<at::Tensor, at::Tensor> tiny_data(const plan::ModelSpec& spec, int step, std::int64_t begin, std::int64_t count) {
  if (spec.type == plan::ModelType::vgg) {
    const auto all = at::arange(tiny_samples * 3 * spec.image * spec.image, at::kDouble)
                         .add(step * 1000)
                         .mul(0.37)
                         .sin()
                         .view({tiny_samples, 3, spec.image, spec.image});
    return {all.narrow(0, begin, count), at::arange(tiny_samples).add(step).remainder(spec.classes).narrow(0, begin, count)};
  }
  const auto all =
      at::arange(tiny_samples * (sequence + 1)).mul(7 + 2 * step).add(step).remainder(31).view({tiny_samples, sequence + 1});
  return {all.narrow(0, begin, count).narrow(1, 0, sequence).contiguous(),
          all.narrow(0, begin, count).narrow(1, 1, sequence).contiguous()};
}

TinyOutcome train_tiny(const World& world, const TinyRun& run) {
  auto description = plan::describe(run.spec);
  plan::recompute(description, run.recompute, run.recompute_every);
  auto model = build_model(std::move(description), {.seed = 5, .dtype = run.dtype, .device = world.device()});
  const int ranks = world.size();
  if (run.frozen) {
    bool even = true;
    for (auto& parameter : model->parameters())
      if ((even = !even)) parameter.set_requires_grad(false);
  }
  const Mesh mesh = world.mesh({.replicate = ranks / run.factor, .shard = run.factor});
  auto options = run.options;
  options.precision.parameters = run.compute;
  options.precision.scaled_loss = run.scaled;
  options.buckets = {.bucket_bytes = 4096, .first_bucket_bytes = 512};
  Engine engine = shard(mesh, *model, options);
  AdamW optimizer(engine, {.lr = 0.01, .weight_decay = 0.1});
  GradScaler scaler({.scale = 128});
  const std::int64_t mine = tiny_samples / ranks, part = mine / run.accumulation;
  TinyOutcome outcome;
  for (int step = 0; step < run.steps; ++step) {
    double sum = 0;
    for (int micro = 0; micro < run.accumulation; ++micro) {
      const std::int64_t begin = world.rank() * mine + micro * part;
      auto [input, target] = tiny_data(run.spec, step, begin, part);
      if (input.is_floating_point()) input = input.to(run.compute.value_or(run.dtype));
      model->set_dropout(static_cast<std::uint64_t>(step), begin);
      const auto loss = model->loss(input.to(world.device()), target.to(world.device())) / run.accumulation;
      sum += loss.item<double>();
      const auto scaled = run.scaled ? scaler.scale(loss) : loss;
      micro + 1 < run.accumulation ? engine.accumulate(scaled) : engine.backward(scaled);
    }
    optimizer.step({.clip = 1.0, .scaler = run.scaled ? &scaler : nullptr});
    outcome.losses.push_back(mesh.group(Axis::data).sum(sum) / ranks);
  }
  engine.check_equal();
  const auto whole = engine.full_parameters();
  std::vector<at::Tensor> flat;
  for (auto& parameter : model->parameters()) flat.push_back(parameter.detach().to(at::kCPU, at::kDouble).reshape(-1));
  outcome.weights = at::cat(flat);
  return outcome;
}

double relative_distance(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

}  // namespace bonfire::testing
