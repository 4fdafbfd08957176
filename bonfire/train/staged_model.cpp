#include "bonfire/train/staged_model.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/models/model.h"
#include "bonfire/models/precision.h"
#include "bonfire/pipeline/unit_costs.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/pipedream.h"
#include "bonfire/schedule/text.h"
#include "bonfire/shard/share.h"
#include "bonfire/train/engine_options.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

int microbatches_of(const Config& config) {
  return static_cast<int>(config.train.batch / config.data_ranks() / config.train.microbatch);
}

PipelineOptions options_of(const Config& config) {
  PipelineOptions options{.schedule = schedule_of(config), .schedule_name = config.layout.schedule};
  options.stages = stages_of(config, options.schedule.stages);
  return options;
}

}  // namespace

Chain units_of(const plan::ModelDescription& model) {
  Chain chain{.units = plan::chain_of(model)};
  TiedWeight tied;
  for (std::size_t at = 0; at < chain.units.size(); ++at)
    for (const auto& name : model.unit(chain.units[at]).shared) tied.uses.push_back({static_cast<int>(at), name});
  if (!tied.uses.empty()) chain.tied.push_back(std::move(tied));
  return chain;
}

std::vector<Microbatch> to_microbatches(const std::vector<Batch>& batches, const World& world) {
  std::vector<Microbatch> list;
  for (const auto& batch : batches) {
    list.push_back({.input = {batch.input.to(world.device(), batch.input.scalar_type(), /*non_blocking=*/true)},
                    .target = {batch.target.to(world.device(), batch.target.scalar_type(), /*non_blocking=*/true)}});
    // Every stage reads it.
    if (batch.documents.defined()) list.back().target.push_back(batch.documents);
  }
  return list;
}

Microbatch example_of(const Config& config, const Source& source, const World& world) {
  const auto zeros = [&](const SampleField& field) {
    auto sizes = field.sizes;
    sizes.insert(sizes.begin(), config.train.microbatch);
    return at::zeros(sizes, at::TensorOptions(field.dtype).device(world.device()));
  };
  return {.input = {zeros(source.input())}, .target = {zeros(source.target())}};
}

Chain chain_of(const Config& config, const World& world, const Mesh& mesh, std::shared_ptr<const std::int64_t> rollbacks) {
  const auto model = model_of(config, mesh.coordinate(Axis::tensor));
  Chain chain = units_of(model);
  const BuildOptions build = build_options(config, world, mesh);
  const bool faulty = has_faulty_loss(config, world);
  chain.build = [model, build, faulty, config, rollbacks = std::move(rollbacks)](UnitRange units) {
    auto part = build_model(plan::part_of(model, units.begin, units.end), build);
    prepare_blocks(*part, config);
    return StageModule{part, [part, faulty, fault = config.fault, rollbacks](Tensors values, const Microbatch& microbatch) {
                         part->set_dropout(microbatch.step, microbatch.first_sample);
                         part->set_documents(microbatch.target.size() > 1 ? microbatch.target[1] : at::Tensor());
                         auto out = part->forward(values[0], part->head() ? microbatch.target[0] : at::Tensor());
                         if (faulty && fault.makes_nan(static_cast<std::int64_t>(microbatch.step), *rollbacks))
                           out = out * std::numeric_limits<double>::quiet_NaN();
                         return Tensors{std::move(out)};
                       }};
  };
  return chain;
}

schedule::Schedule schedule_of(const Config& config) {
  const auto& layout = config.layout;
  const auto& names = schedule::schedule_names();
  const int ranks = static_cast<int>(layout.pipeline), microbatches = microbatches_of(config);
  if (std::find(names.begin(), names.end(), layout.schedule) != names.end())
    return schedule::generate(layout.schedule, {.ranks = ranks,
                                                .microbatches = microbatches,
                                                .chunks = layout.chunks > 0 ? static_cast<int>(layout.chunks)
                                                                            : schedule::natural_chunks(layout.schedule)});
  if (!std::filesystem::exists(layout.schedule))
    fail_config("no schedule has this name, and there is no such file; allowed: {} | {} | a file", fmt::join(names, " | "),
                fmt::join(schedule::pipedream_names(), " | "));
  auto table = schedule::read_table(layout.schedule);
  if (table.ranks() != ranks) fail_config("the table has {} ranks, layout.pipeline is {}", table.ranks(), ranks);
  if (table.microbatches != microbatches)
    fail_config(
        "the table has {} microbatches, a rank's part of the batch {} (train.batch / data-parallel ranks / "
        "train.microbatch)",
        table.microbatches, microbatches);
  if (layout.chunks > 0 && layout.chunks * ranks != table.stages)
    fail_config("the table has {} stages on {} ranks, layout.chunks is {}", table.stages, ranks, layout.chunks);
  return table;
}

std::vector<UnitRange> stages_of(const Config& config, int stages) {
  const int units = static_cast<int>(plan::chain_of(model_of(config)).size());
  const auto* const counts = std::get_if<std::vector<std::int64_t>>(&config.layout.stages);
  if (!counts) return split_evenly(units, stages);
  if (static_cast<int>(counts->size()) != stages)
    fail_config("{} stages are given, the schedule has {} (pipeline x chunks)", counts->size(), stages);
  return split_as_told(units, {counts->begin(), counts->end()});
}

UnitsToMeasure units_to_measure(const Config& config, const World& world, const Mesh& mesh, const Source& source) {
  const auto model = model_of(config);
  auto build = build_options(config, world, mesh);
  build.dtype = scalar_type(data_parallel_of(config).compute);
  UnitsToMeasure units{.chain = units_of(model), .example = example_of(config, source, world)};
  units.chain.build = [model, build, kept = kept_of(config)](UnitRange range) {
    auto part = build_model(plan::part_of(model, range.begin, range.end), build);
    keep_for_backward(*part, kept);
    return StageModule{part, [part](Tensors values, const Microbatch& microbatch) {
                         return Tensors{part->forward(values[0], part->head() ? microbatch.target[0] : at::Tensor())};
                       }};
  };
  for (auto& input : units.example.input)
    if (input.is_floating_point()) input = input.to(build.dtype);
  return units;
}

void settle_stages(Config& config, const World& world, const Mesh& mesh, const Source& source) {
  if (config.layout.stages != WordOrCounts("measured")) return;
  const auto [chain, example] = units_to_measure(config, world, mesh, source);
  const auto costs = agreed_costs(mesh, chain, example);
  auto& counts = config.layout.stages.emplace<std::vector<std::int64_t>>();
  std::vector<std::string> words;
  for (const auto& range : split_by_cost(costs, schedule_of(config).stages)) {
    counts.push_back(range.count());
    double sum = 0;
    for (int unit = range.begin; unit < range.end; ++unit) sum += costs[static_cast<std::size_t>(unit)];
    words.push_back(fmt::format("{} ({:.3g} ms)", range.count(), 1e3 * sum));
  }
  if (world.rank() == 0) world.log().info("stages: {} Units, by the measured time of a microbatch", fmt::join(words, ", "));
}

schedule::Schedule table_of(const Config& config) {
  auto options = options_of(config);
  options.shard = engine_options(config, Log::silent());
  return pipeline_table(
      units_of(model_of(config)), options,
      {static_cast<int>(config.layout.replicate * config.layout.context), static_cast<int>(config.layout.shard)});
}

StagedModel::StagedModel(const World& world, const Config& config, const Mesh& mesh, const Source& source)
    : world_(world),
      pipeline_([&] {
        auto options = options_of(config);
        options.shard = engine_options(config, world.log(), mesh.coordinate(Axis::tensor));
        options.example = example_of(config, source, world);
        return Pipeline(mesh, chain_of(config, world, mesh, rollbacks_), std::move(options));
      }()),
      optimizer_(make_optimizer(pipeline_, config)) {}

at::Tensor StagedModel::forward_backward(const std::vector<Batch>& batches, const StepContext& context) {
  auto microbatches = to_microbatches(batches, world_);
  auto first_sample = context.first_sample;
  *rollbacks_ = context.rollbacks;
  for (auto& microbatch : microbatches) {
    microbatch.step = static_cast<std::uint64_t>(context.step);
    microbatch.first_sample = first_sample;
    first_sample += microbatch.samples();
  }
  std::optional<Tracer::Phase> phase;
  const auto report = pipeline_.step(microbatches, {.loss_scale = context.scaler ? context.scaler->scale() : 1,
                                                    .observe = [&](const schedule::Action& action, bool begins) {
                                                      if (!schedule::is_compute(action.kind)) return;
                                                      phase.reset();
                                                      if (begins) phase.emplace(&context.tracer, schedule::to_text(action));
                                                    }});
  return at::tensor({report.loss}, at::kDouble).to(world_.device());
}

at::Tensor StagedModel::evaluate(const std::vector<Batch>& batches, std::size_t counted) {
  auto microbatches = to_microbatches(batches, world_);
  for (std::size_t at = 0; at < microbatches.size(); ++at)
    microbatches[at].weight = at < counted ? static_cast<double>(microbatches[at].samples()) : 0;
  const auto train = [&](bool on) {
    for (const int stage : pipeline_.local_stages()) pipeline_.module(stage).train(on);
  };
  train(false);
  const auto report = pipeline_.evaluate(microbatches);
  train(true);
  return at::tensor({report.loss * report.weight, report.weight}, at::kDouble).to(world_.device());
}

}  // namespace bonfire
