#include "tests/support/pipeline_training.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include "bonfire/models/model.h"
#include "bonfire/optim/grad_scaler.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/activations.h"
#include "bonfire/schedule/generate.h"
#include "tests/support/tiny_training.h"

namespace bonfire::testing {
namespace {

constexpr double lr = 0.01, decay = 0.1, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;

std::vector<std::int64_t> sizes_of(const PipelineRun& run) {
  if (!run.sizes.empty()) return run.sizes;
  const std::int64_t samples = tiny_samples / run.shape.along(Axis::data);
  std::vector<std::int64_t> sizes;
  for (int at = 0; at < run.microbatches; ++at)
    sizes.push_back(samples / run.microbatches + (at < samples % run.microbatches ? 1 : 0));
  return sizes;
}

std::vector<Microbatch> batch_of(const PipelineRun& run, int step, int data_rank, at::Device device) {
  const auto sizes = sizes_of(run);
  std::int64_t begin = data_rank * std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  std::vector<Microbatch> batch;
  for (const auto size : sizes) {
    auto [input, target] = tiny_data(run.spec, step, begin, size);
    if (input.is_floating_point()) input = input.to(run.compute.value_or(run.dtype));
    batch.push_back({.input = {input.to(device)},
                     .target = {target.to(device)},
                     .first_sample = begin,
                     .step = static_cast<std::uint64_t>(step)});
    begin += size;
  }
  return batch;
}

}  // namespace

Chain chain_of_model(const plan::ModelSpec& spec, const ChainOptions& options) {
  auto description = plan::describe(spec);
  plan::recompute(description, options.recompute);
  Chain chain{.units = plan::chain_of(description)};
  chain.build = [description, options](UnitRange units) {
    auto model = build_model(plan::part_of(description, units.begin, units.end),
                             {.seed = 5, .dtype = options.dtype, .device = options.device});
    return StageModule{model, [model](Tensors values, const Microbatch& microbatch) {
                         model->set_dropout(microbatch.step, microbatch.first_sample);
                         return Tensors{model->forward(values[0], model->head() ? microbatch.target[0] : at::Tensor())};
                       }};
  };
  TiedWeight tied;
  for (std::size_t at = 0; at < chain.units.size(); ++at)
    for (const auto& name : description.unit(chain.units[at]).shared) tied.uses.push_back({static_cast<int>(at), name});
  if (!tied.uses.empty()) chain.tied.push_back(tied);
  return chain;
}

PipelineOutcome train_pipeline(const World& world, const PipelineRun& run) {
  const Mesh mesh = world.mesh(run.shape);
  PipelineOptions options{.schedule_name = run.schedule, .shard = run.shard};
  options.schedule =
      run.table ? *run.table
                : schedule::generate(run.schedule,
                                     {.ranks = run.shape.pipeline, .microbatches = run.microbatches, .chunks = run.chunks});
  options.shard.precision.parameters = run.compute;
  options.shard.precision.scaled_loss = run.scaled;
  options.shard.buckets = {.bucket_bytes = 4096, .first_bucket_bytes = 512};
  Pipeline pipeline(
      mesh, chain_of_model(run.spec, {.dtype = run.dtype, .device = world.device(), .recompute = run.recompute}), options);

  AdamW optimizer(pipeline, {.lr = lr, .weight_decay = decay});
  GradScaler scaler({.scale = 128});
  const auto& data = mesh.group(Axis::data);
  PipelineOutcome outcome;
  std::vector<Microbatch> batch;
  for (int step = 0; step < run.steps; ++step) {
    batch = batch_of(run, step, mesh.coordinate(Axis::data), world.device());
    const auto report = pipeline.step(batch, {.loss_scale = run.scaled ? scaler.scale() : 1});
    optimizer.step({.clip = run.clip, .scaler = run.scaled ? &scaler : nullptr});
    outcome.losses.push_back(data.sum(report.loss) / data.size());
  }
  outcome.peak_activations = pipeline.peak_activations();
  for (const auto& cell : pipeline.executed()) outcome.executed.push_back(cell.action);
  outcome.row = pipeline.table().rows[static_cast<std::size_t>(mesh.coordinate(Axis::pipeline))];
  outcome.evaluated = data.sum(pipeline.evaluate(batch).loss) / data.size();
  for (const int stage : pipeline.local_stages()) {
    pipeline.engine(stage).check_equal();
    const auto whole = pipeline.engine(stage).full_parameters();
    for (const auto& item : pipeline.module(stage).named_parameters())
      outcome.weights[item.key()] = item.value().detach().to(at::kCPU, at::kDouble).clone();
  }
  return outcome;
}

PipelineOutcome train_plainly(const PipelineRun& run) {
  at::set_num_threads(1);  // too small for more
  auto model = build_model(run.spec, {.seed = 5, .dtype = run.dtype});
  const int ranks = run.shape.along(Axis::data);
  const auto mean_loss = [&](int step, bool differentiate) {
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto batch = batch_of(run, step, rank, at::kCPU);
      std::int64_t samples = 0;
      for (const auto& microbatch : batch) samples += microbatch.samples();
      for (const auto& microbatch : batch) {
        model->set_dropout(microbatch.step, microbatch.first_sample);
        const auto loss = model->loss(microbatch.input[0], microbatch.target[0]) *
                          (static_cast<double>(microbatch.samples()) / static_cast<double>(samples) / ranks);
        sum += loss.item<double>();
        if (differentiate) loss.backward();
      }
    }
    return sum;
  };
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> moments;
  PipelineOutcome outcome;
  for (int step = 0; step < run.steps; ++step) {
    outcome.losses.push_back(mean_loss(step, true));
    const at::NoGradGuard no_grad;
    double squares = 0;
    for (const auto& parameter : model->parameters()) squares += parameter.grad().pow(2).sum().item<double>();
    const double factor = run.clip > 0 && std::sqrt(squares) > run.clip ? run.clip / (std::sqrt(squares) + 1e-6) : 1;
    for (auto& item : model->named_parameters()) {
      auto& parameter = item.value();
      auto& [first, second] = moments[item.key()];
      if (!first.defined()) first = at::zeros_like(parameter), second = at::zeros_like(parameter);
      const auto gradient = parameter.grad() * factor;
      first.mul_(beta1).add_(gradient, 1 - beta1);
      second.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
      parameter.mul_(1 - lr * decay);
      const auto bias1 = 1 - std::pow(beta1, step + 1), bias2 = 1 - std::pow(beta2, step + 1);
      parameter.addcdiv_(first / bias1, (second / bias2).sqrt() + eps, -lr);
      parameter.mutable_grad().reset();
    }
  }
  const at::NoGradGuard no_grad;
  outcome.evaluated = mean_loss(run.steps - 1, false);
  for (const auto& item : model->named_parameters()) outcome.weights[item.key()] = item.value().detach().to(at::kDouble);
  return outcome;
}

void expect_parity(const PipelineOutcome& pipeline, const PipelineOutcome& plain, double tolerance) {
  ASSERT_EQ(pipeline.losses.size(), plain.losses.size());
  for (std::size_t step = 0; step < plain.losses.size(); ++step)
    EXPECT_NEAR(pipeline.losses[step], plain.losses[step], tolerance * plain.losses[step]) << "step " << step;
  EXPECT_NEAR(pipeline.evaluated, plain.evaluated, tolerance * plain.evaluated);
  EXPECT_FALSE(pipeline.weights.empty());
  for (const auto& [name, weight] : pipeline.weights) {
    const auto& expected = plain.weights.at(name);
    EXPECT_LT((weight - expected).norm().item<double>(), tolerance * expected.norm().item<double>() + 1e-15) << name;
  }
}

}  // namespace bonfire::testing
