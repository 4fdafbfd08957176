#include "bonfire/pipeline/pipeline.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/pipeline/executor.h"
#include "bonfire/pipeline/form.h"
#include "bonfire/pipeline/hear.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/pipeline/stage.h"
#include "bonfire/pipeline/tied.h"
#include "bonfire/plan/sharding.h"
#include "bonfire/schedule/passes.h"
#include "bonfire/schedule/validate.h"
#include "bonfire/shard/engine_memory.h"

namespace bonfire {
namespace {

std::vector<UnitRange> stages_of(const Chain& chain, const PipelineOptions& options) {
  const int units = static_cast<int>(chain.units.size()), stages = options.schedule.stages;
  if (options.stages.empty()) return split_evenly(units, stages);
  if (static_cast<int>(options.stages.size()) != stages)
    fail_config("schedule {} is for {} stages, and {} are given", options.schedule_name, stages, options.stages.size());
  std::vector<int> counts;
  for (const auto& range : options.stages) counts.push_back(range.count());
  return split_as_told(units, counts);
}

schedule::LowerOptions lowering(const Chain& chain, const PipelineOptions& options, const DataRanks& ranks) {
  const auto factors = plan::factors_of(options.shard.what, ranks.shard, options.shard.accumulation);
  schedule::LowerOptions how{.receive_ahead = options.receive_ahead,
                             .sharded_parameters = factors.parameters > 1 || options.shard.offload == Offload::parameters,
                             .resident = options.resident,
                             // A stage on one rank reduces with itself: there is one way through a step.
                             .reductions = true,
                             .reduce = factors.gradients > 1 ? schedule::Reduce::each : schedule::Reduce::once};
  for (const auto& group : tie_groups(chain, stages_of(chain, options))) how.tied.push_back(group.stages);
  return how;
}

bool splits_backward(const schedule::Schedule& table) {
  for (const auto& row : table.rows)
    for (const auto& action : row)
      if (action.kind == schedule::Kind::input_gradient) return true;
  return false;
}

// What microbatches weigh in the mean over all of them.
struct Weights {
  std::vector<double> each;
  double total = 0;   // of what was said, or of samples
  bool said = false;  // by the microbatches themselves
};

Weights weights_of(const std::vector<Microbatch>& microbatches) {
  Weights weights{.said = microbatches.front().weight.has_value()};
  for (std::size_t at = 0; at < microbatches.size(); ++at) {
    const auto& weight = microbatches[at].weight;
    require(weight.has_value() == weights.said,
            "microbatch {} has {} weight, and microbatch 0 has {}; allowed: all of them, or none", at, weight ? "a" : "no",
            weights.said ? "one" : "none");
    require(!weight || (std::isfinite(*weight) && *weight >= 0), "microbatch {} has a weight of {}; allowed: 0 and more", at,
            weight.value_or(0));
    weights.each.push_back(weight ? *weight : static_cast<double>(microbatches[at].samples()));
    weights.total += weights.each.back();
  }
  for (auto& weight : weights.each) weight = weights.total > 0 ? weight / weights.total : 0;
  return weights;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

schedule::Schedule pipeline_table(const Chain& chain, const PipelineOptions& options, const DataRanks& ranks) {
  auto table = schedule::lower(options.schedule, lowering(chain, options, ranks));
  const auto factors = plan::factors_of(options.shard.what, ranks.shard, options.shard.accumulation);
  schedule::validate(table, options.schedule_name,
                     {// Only a rank's own part of a whole gradient is averaged.
                      .reduces_once = factors.optimizer > factors.gradients,
                      .one_rank_per_stage = true,
                      .tied = lowering(chain, options, ranks).tied});
  return table;
}

namespace {

schedule::Schedule table_for(const Mesh& mesh, const Chain& chain, const PipelineOptions& options) {
  const auto& shape = mesh.shape();
  if (options.schedule.ranks() != shape.pipeline)
    fail_config("schedule {} is for {} pipeline ranks; the mesh has {}", options.schedule_name, options.schedule.ranks(),
                shape.pipeline);
  return pipeline_table(chain, options, {shape.replicate, shape.shard});
}

}  // namespace

struct Pipeline::State {
  State(const Mesh& on, Chain given, PipelineOptions asked);

  const Group& pipeline() const { return mesh.group(Axis::pipeline); }
  int rank_of(int stage) const { return index.find(schedule::Kind::forward, stage, 0).rank; }
  void agree(const Microbatch& microbatch);
  std::string probe(int stage, const Crossing& incoming, Tensors& values, const Microbatch& microbatch);
  Executor& evaluator(int microbatches);
  PipelineReport tell_all(const at::Tensor& sums, double weight);

  Mesh mesh;
  Chain chain;
  PipelineOptions options;
  std::vector<UnitRange> ranges;
  schedule::LowerOptions how;
  schedule::Schedule table;
  schedule::Index index;
  std::vector<int> local;
  std::map<int, StageModule> built;
  Ties ties;
  Executor::Stages stages;
  std::unique_ptr<Links> links;
  std::unique_ptr<Executor> training;
  std::map<int, std::unique_ptr<Executor>> evaluations;  // by number of microbatches
  const Executor* last_run = nullptr;
  at::Device device = at::kCPU;
  bool agreed = false;
  int reports = 1;
};

Pipeline::State::State(const Mesh& on, Chain given, PipelineOptions asked)
    : mesh(on),
      chain(std::move(given)),
      options(std::move(asked)),
      ranges(stages_of(chain, options)),
      how(lowering(chain, options, {mesh.shape().replicate, mesh.shape().shard})),
      table(table_for(mesh, chain, options)),
      index(table),
      ties(mesh, chain, ranges, table) {
  std::map<int, torch::nn::Module*> modules;
  for (int stage = 0; stage < table.stages; ++stage) {
    if (rank_of(stage) != mesh.coordinate(Axis::pipeline)) continue;
    local.push_back(stage);
    auto module = chain.build(ranges[static_cast<std::size_t>(stage)]);
    if (const auto parameters = module.module->parameters(); !parameters.empty()) device = parameters.front().device();
    modules.emplace(stage, module.module.get());
    built.emplace(stage, std::move(module));
  }
  ties.begin_equal(std::move(modules), device);
  std::map<int, Engine*> engines;
  const auto memory = std::make_shared<EngineMemory>(device);
  for (auto& [stage, module] : built) {
    auto shard = options.shard;
    shard.memory = memory;
    for (const auto& group : ties.groups())
      if (group.names.contains(stage)) shard.wrapping.apart.push_back(group.of(stage));
    const Stage::Place place{.number = stage, .stages = table.stages, .units = ranges[static_cast<std::size_t>(stage)]};
    stages.emplace(stage, std::make_unique<Stage>(place, module, mesh, std::move(shard)));
    engines.emplace(stage, &stages.at(stage)->engine());
  }
  ties.require_same_layout(engines, device);
  links = std::make_unique<Links>(mesh, table, device);
  training = std::make_unique<Executor>(table, mesh.coordinate(Axis::pipeline), stages, *links, ties);
  if (options.example) agree(*std::exchange(options.example, std::nullopt));
}

std::string Pipeline::State::probe(int number, const Crossing& incoming, Tensors& values, const Microbatch& microbatch) {
  Stage& stage = *stages.at(number);
  std::string words;
  stage.engine().unshard();
  try {
    values = stage.probe({.incoming = incoming, .split = splits_backward(table)}, values, microbatch);
    words = fmt::format("ok {} {}", stage.reports(), to_words(stage.outgoing(form_of(microbatch))));
  } catch (const ConfigError& error) {
    words = error.what();
  } catch (const std::exception& error) {
    words = fmt::format("{}: forward failed on what came in, {}: {}", stage.name(), to_string(incoming),
                        first_line(error.what()));
  }
  stage.engine().reshard();
  return words;
}

// Stage by stage through the model: each sees what comes in, and all hear what goes out, or what is wrong.
void Pipeline::State::agree(const Microbatch& microbatch) {
  Crossing incoming;
  Tensors values = microbatch.input;
  const int me = mesh.coordinate(Axis::pipeline);
  for (int stage = 0; stage < table.stages; ++stage) {
    const int at = rank_of(stage);
    std::string words;
    if (at == me) words = probe(stage, incoming, values, microbatch);
    words = hear(pipeline(), words, at, device);
    if (!words.starts_with("ok ")) fail_config("{}", words);
    const auto shapes = words.find(' ', 3);
    reports = std::stoi(words.substr(3, shapes - 3));
    incoming = from_words(words.substr(shapes + 1));
    if (stage + 1 == table.stages) break;
    const int next = rank_of(stage + 1);
    if (at == next) continue;
    if (at == me) links->send(values, next).wait();
    if (next == me) {
      values = links->room(incoming, microbatch.samples(), -1);
      links->receive(values, at).wait();
    }
  }
  agreed = true;
}

PipelineReport Pipeline::State::tell_all(const at::Tensor& sums, double weight) {
  auto numbers = sums.defined() ? sums : at::zeros({reports}, at::TensorOptions(at::kDouble).device(device));
  pipeline().broadcast(numbers, rank_of(table.stages - 1)).wait();
  const auto here = numbers.cpu();
  const auto* const first = here.data_ptr<double>();
  return {.loss = *first, .weight = weight, .reports = {first + 1, first + here.numel()}};
}

Executor& Pipeline::State::evaluator(int microbatches) {
  auto& executor = evaluations[microbatches];
  if (executor) return *executor;
  auto forwards = schedule::forwards_only(options.schedule);
  forwards.microbatches = microbatches;
  for (auto& row : forwards.rows)
    std::erase_if(row, [&](const schedule::Action& action) { return action.microbatch >= microbatches; });
  const auto lowered = schedule::lower(std::move(forwards), how);
  schedule::validate(lowered, options.schedule_name + ", forwards alone");
  executor = std::make_unique<Executor>(lowered, mesh.coordinate(Axis::pipeline), stages, *links, ties);
  return *executor;
}

Pipeline::Pipeline(const Mesh& mesh, Chain chain, PipelineOptions options)
    : state_(std::make_unique<State>(mesh, std::move(chain), std::move(options))) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

PipelineReport Pipeline::step(const std::vector<Microbatch>& microbatches, const StepOptions& how) {
  auto& state = *state_;
  require(static_cast<int>(microbatches.size()) == state.table.microbatches,
          "schedule {} is for {} microbatches, and {} were given", state.options.schedule_name, state.table.microbatches,
          microbatches.size());
  if (!state.agreed) state.agree(microbatches.front());
  state.ties.require_same_training(state.device);
  const auto weights = weights_of(microbatches);
  double scale = how.loss_scale;
  // Engines average over the data-parallel ranks.
  if (weights.said && state.stages.contains(state.table.stages - 1)) {
    const auto& data = state.mesh.group(Axis::data);
    const double all = data.sum(weights.total);
    scale *= all > 0 ? weights.total * data.size() / all : 0;
  }
  state.last_run = state.training.get();
  return state.tell_all(state.training->run({.microbatches = microbatches,
                                             .weights = weights.each,
                                             .loss_scale = scale,
                                             .update = how.update,
                                             .observe = how.observe}),
                        weights.total);
}

PipelineReport Pipeline::evaluate(const std::vector<Microbatch>& microbatches) {
  auto& state = *state_;
  require(!microbatches.empty(), "an evaluation of no microbatches");
  if (!state.agreed) state.agree(microbatches.front());
  const at::NoGradGuard no_grad;
  const auto weights = weights_of(microbatches);
  at::Tensor sums;
  const auto part_of = [](const auto& list, std::size_t begin, std::size_t end) {
    return std::vector(list.begin() + static_cast<std::ptrdiff_t>(begin), list.begin() + static_cast<std::ptrdiff_t>(end));
  };
  const auto most = static_cast<std::size_t>(state.table.microbatches);
  for (std::size_t begin = 0; begin < microbatches.size(); begin += most) {
    const auto end = std::min(microbatches.size(), begin + most);
    const auto part = part_of(microbatches, begin, end);
    auto& executor = state.evaluator(static_cast<int>(part.size()));
    state.last_run = &executor;
    const auto means = executor.run({.microbatches = part, .weights = part_of(weights.each, begin, end)});
    if (means.defined()) sums = sums.defined() ? sums.add_(means) : means;
  }
  return state.tell_all(sums, weights.total);
}

const schedule::Schedule& Pipeline::table() const { return state_->table; }
const std::vector<UnitRange>& Pipeline::stages() const { return state_->ranges; }
const std::vector<int>& Pipeline::local_stages() const { return state_->local; }
Engine& Pipeline::engine(int stage) { return state_->stages.at(stage)->engine(); }
torch::nn::Module& Pipeline::module(int stage) { return state_->stages.at(stage)->module(); }
bool Pipeline::is_copy(int stage, const FlatParameter& flat) const { return state_->ties.is_copy(stage, flat); }
int Pipeline::peak_activations() const { return state_->last_run ? state_->last_run->peak_activations() : 0; }
std::int64_t Pipeline::pool_bytes() const { return state_->links->pool_bytes(); }
const std::vector<ExecutedCell>& Pipeline::executed() const {
  require(state_->last_run, "no cell was executed yet");
  return state_->last_run->executed();
}

}  // namespace bonfire
