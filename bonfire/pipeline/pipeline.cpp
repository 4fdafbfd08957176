#include "bonfire/pipeline/pipeline.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/hear.h"
#include "bonfire/pipeline/executor.h"
#include "bonfire/pipeline/form.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/pipeline/microbatch_weights.h"
#include "bonfire/pipeline/stage.h"
#include "bonfire/pipeline/stage_wrappings.h"
#include "bonfire/pipeline/tied.h"
#include "bonfire/plan/sharding.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/validate.h"
#include "bonfire/shard/engine_memory.h"
#include "bonfire/shard/settings.h"

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

// Whether the Units of a stage gather themselves.
bool gathers_units(const PipelineOptions& options, const DataRanks& ranks) {
  const auto factors = plan::factors_of(options.shard.what, ranks.shard, options.shard.accumulation);
  const auto& reshard = options.shard.reshard_after_forward;
  return (factors.parameters > 1 || options.shard.offload == Offload::parameters) && reshard.said && reshard.free &&
         reshard.ranks == 0;
}

schedule::LowerOptions lowering(const Chain& chain, const PipelineOptions& options, const DataRanks& ranks) {
  const auto factors = plan::factors_of(options.shard.what, ranks.shard, options.shard.accumulation);
  const bool comes_and_goes = factors.parameters > 1 || options.shard.offload == Offload::parameters;
  schedule::LowerOptions how{.receive_ahead = options.receive_ahead,
                             .sharded_parameters = comes_and_goes && !gathers_units(options, ranks),
                             .resident = options.resident,
                             // A stage on one rank reduces with itself: there is one way through a step.
                             .reductions = true,
                             .reduce = factors.gradients > 1 ? schedule::Reduce::each : schedule::Reduce::once};
  for (const auto& group : tie_groups(chain, stages_of(chain, options))) how.tied.push_back(group.stages);
  return how;
}

bool has(const schedule::Schedule& table, schedule::Kind kind) {
  for (const auto& row : table.rows)
    for (const auto& action : row)
      if (action.kind == kind) return true;
  return false;
}

bool splits_backward(const schedule::Schedule& table) { return has(table, schedule::Kind::input_gradient); }

// The second half of a backward reads weights as well, when their Unit has been freed; and a table cannot say when Units are
// gathered.
void require_units_can_gather(const schedule::Schedule& table, const PipelineOptions& options) {
  const char* const allowed = "allowed: reshard_after_forward = false";
  if (splits_backward(table))
    fail_config(
        "schedule {} splits backward into halves, and with reshard_after_forward = true Units are freed after the "
        "first; {}, or a schedule with whole backwards",
        options.schedule_name, allowed);
  for (const auto kind : {schedule::Kind::unshard, schedule::Kind::reshard})
    if (has(table, kind))
      fail_config(
          "schedule {} has {} cells, which gather or free whole stages, and with reshard_after_forward = true Units "
          "are gathered one by one; {}, or a schedule without such cells",
          options.schedule_name, kind == schedule::Kind::unshard ? "UNSHARD" : "RESHARD", allowed);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

schedule::Schedule pipeline_table(const Chain& chain, const PipelineOptions& options, const DataRanks& ranks) {
  auto table = schedule::lower(options.schedule, lowering(chain, options, ranks));
  if (gathers_units(options, ranks)) require_units_can_gather(table, options);
  const auto factors = plan::factors_of(options.shard.what, ranks.shard, options.shard.accumulation);
  schedule::validate(table, options.schedule_name,
                     {// Only a rank's own part of a whole gradient is averaged.
                      .reduces_once = factors.optimizer > factors.gradients,
                      .one_rank_per_stage = true,
                      .tied = lowering(chain, options, ranks).tied});
  return table;
}

namespace {

// The ranks that average the gradients of one stage.
DataRanks data_ranks_of(const MeshShape& shape) { return {shape.replicate * shape.context, shape.shard}; }

schedule::Schedule table_for(const Mesh& mesh, const Chain& chain, const PipelineOptions& options) {
  const auto& shape = mesh.shape();
  if (options.schedule.ranks() != shape.pipeline)
    fail_config("schedule {} is for {} pipeline ranks; the mesh has {}", options.schedule_name, options.schedule.ranks(),
                shape.pipeline);
  return pipeline_table(chain, options, data_ranks_of(shape));
}

}  // namespace

struct Pipeline::State {
  State(const Mesh& on, Chain given, PipelineOptions asked);

  const Group& pipeline() const { return mesh.group(Axis::pipeline); }
  Stage::Place place_of(int stage) const {
    return {.number = stage, .stages = table.stages, .units = ranges[static_cast<std::size_t>(stage)]};
  }
  // For each of this rank's stages. What throws for one of them is thrown on all ranks, and names it. Collective.
  void for_local_stages(const std::function<void(int stage)>& what) const;
  int rank_of(int stage) const { return index.find(schedule::Kind::forward, stage, 0).rank; }
  void agree(const Microbatch& microbatch);
  MicrobatchWeights weights(const std::vector<Microbatch>& microbatches) const;
  std::string probe(int stage, const Crossing& incoming, Tensors& values, const Microbatch& microbatch);
  Executor& evaluator(int microbatches);
  at::Tensor evaluated(Executor& executor, const Executor::Step& step);
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
      how(lowering(chain, options, data_ranks_of(mesh.shape()))),
      table(table_for(mesh, chain, options)),
      index(table),
      ties(mesh, chain, ranges, table) {
  // What no stage can have is no stage's mistake.
  const ShardSettings settings(DataGroups::of_stage(mesh), options.shard, DrivenBy::schedule);
  if (const int versions = options.shard.versions; versions > 1)
    fail_config("versions = {} in a pipeline: a backward comes before the update of its step; allowed: 1", versions);
  for (int stage = 0; stage < table.stages; ++stage)
    if (rank_of(stage) == mesh.coordinate(Axis::pipeline)) local.push_back(stage);
  std::map<int, torch::nn::Module*> modules;
  for_local_stages([&](int stage) {
    auto module = chain.build(ranges[static_cast<std::size_t>(stage)]);
    if (const auto parameters = module.module->parameters(); !parameters.empty()) device = parameters.front().device();
    modules.emplace(stage, module.module.get());
    built.emplace(stage, std::move(module));
  });
  const auto wrappings = wrappings_of_stages(pipeline(), modules, options.shard.wrapping, device);
  ties.begin_equal(std::move(modules), device);
  std::map<int, Engine*> engines;
  const auto memory = std::make_shared<EngineMemory>(device);
  for_local_stages([&](int stage) {
    auto shard = options.shard;
    shard.wrapping = wrappings.at(stage);
    shard.placement = [this, stage, given = shard.placement](const std::string& name, const at::Tensor& parameter) {
      return ties.placement(stage, name, given ? given(name, parameter) : plan::Placement{});
    };
    stages.emplace(stage, std::make_unique<Stage>(place_of(stage), built.at(stage), DataGroups::of_stage(mesh),
                                                  std::move(shard), memory));
    engines.emplace(stage, &stages.at(stage)->engine());
  });
  ties.require_same_layout(engines, device);
  links = std::make_unique<Links>(mesh, table, device);
  training = std::make_unique<Executor>(table, mesh.coordinate(Axis::pipeline), stages, *links, ties);
  if (options.example) agree(*std::exchange(options.example, std::nullopt));
}

void Pipeline::State::for_local_stages(const std::function<void(int stage)>& what) const {
  do_or_fail_together(pipeline(), [&] {
    for (const int stage : local) try {
        what(stage);
      } catch (const ConfigError& error) {
        fail_config("{}: {}", place_of(stage).name(), error.what());
      } catch (const std::exception& error) {
        fail("{}: {}", place_of(stage).name(), error.what());
      }
  });
}

std::string Pipeline::State::probe(int number, const Crossing& incoming, Tensors& values, const Microbatch& microbatch) {
  Stage& stage = *stages.at(number);
  std::string words;
  stage.driver().unshard();
  try {
    values = stage.probe({.incoming = incoming, .split = splits_backward(table)}, values, microbatch);
    words = fmt::format("ok {} {}", stage.reports(), to_words(stage.outgoing(form_of(microbatch))));
  } catch (const ConfigError& error) {
    words = error.what();
  } catch (const std::exception& error) {
    words = fmt::format("{}: forward failed on what came in, {}: {}", stage.name(), to_string(incoming),
                        first_line(error.what()));
  }
  stage.driver().reshard();
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

// The ranks of one pipeline are given the same; those that train beside it are not, and would wait for it.
MicrobatchWeights Pipeline::State::weights(const std::vector<Microbatch>& microbatches) const {
  try {
    return weights_of(microbatches);
  } catch (const std::exception& error) {
    mesh.group(Axis::world).all_failed_alike(error.what(), 0, options.shard.patience);
    throw;
  }
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

PipelineReport Pipeline::step(const std::vector<Microbatch>& microbatches, const RunOptions& how) {
  auto& state = *state_;
  require(static_cast<int>(microbatches.size()) == state.table.microbatches,
          "schedule {} is for {} microbatches, and {} were given", state.options.schedule_name, state.table.microbatches,
          microbatches.size());
  const auto weights = state.weights(microbatches);
  if (!state.agreed) state.agree(microbatches.front());
  state.ties.require_same_training(state.device);
  double scale = how.loss_scale;
  // Engines average over the data-parallel ranks.
  if (weights.said && state.stages.contains(state.table.stages - 1)) {
    const auto data = DataGroups::of_stage(state.mesh).all;
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

// A step's failure is told to the others by its engines; an evaluation has nobody else to tell it. Where all failed before
// anything was sent, nobody waits for anybody.
at::Tensor Pipeline::State::evaluated(Executor& executor, const Executor::Step& step) {
  try {
    return executor.run(step);
  } catch (const std::exception& error) {
    mesh.group(Axis::world)
        .all_failed_alike(error.what(), executor.executed().empty() ? 0 : 1 + mesh.coordinate(Axis::world),
                          options.shard.patience);
    throw;
  }
}

PipelineReport Pipeline::evaluate(const std::vector<Microbatch>& microbatches) {
  auto& state = *state_;
  require(!microbatches.empty(), "an evaluation of no microbatches");
  const auto weights = state.weights(microbatches);
  if (!state.agreed) state.agree(microbatches.front());
  const at::NoGradGuard no_grad;
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
    const auto means = state.evaluated(executor, {.microbatches = part, .weights = part_of(weights.each, begin, end)});
    if (means.defined()) sums = sums.defined() ? sums.add_(means) : means;
  }
  return state.tell_all(sums, weights.total);
}

const schedule::Schedule& Pipeline::table() const { return state_->table; }
const std::vector<UnitRange>& Pipeline::stages() const { return state_->ranges; }
const std::vector<int>& Pipeline::local_stages() const { return state_->local; }
Engine& Pipeline::engine(int stage) { return state_->stages.at(stage)->engine(); }
torch::nn::Module& Pipeline::module(int stage) { return state_->stages.at(stage)->module(); }
int Pipeline::peak_activations() const { return state_->last_run ? state_->last_run->peak_activations() : 0; }
std::int64_t Pipeline::pool_bytes() const { return state_->links->pool_bytes(); }
const std::vector<ExecutedCell>& Pipeline::executed() const {
  require(state_->last_run, "no cell was executed yet");
  return state_->last_run->executed();
}

std::vector<Shares::Part> Pipeline::parts() const {
  std::vector<Part> parts;
  for (const auto& [number, stage] : state_->stages)
    for (const auto& flat : stage->engine().flats()) parts.push_back({.flat = flat.get(), .stage = number});
  return parts;
}

// Each engine's grows only.
std::int64_t Pipeline::layout_version() const {
  std::int64_t sum = 0;
  for (const auto& [number, stage] : state_->stages) sum += stage->engine().layout_version();
  return sum;
}

// All stages are divided alike.
Shares::Division Pipeline::division() const {
  const auto& [number, first] = *state_->stages.begin();
  auto division = first->engine().division();
  division.stage = number;
  return division;
}
at::Device Pipeline::device() const { return state_->device; }

std::vector<Slice> Pipeline::slices() {
  // An engine lets go of what it has gathered before its parameters may be written, so these come after.
  std::vector<Slice> others;
  for (const auto& [number, stage] : state_->stages)
    for (auto& slice : stage->engine().slices())
      if (slice.kind != "value") others.push_back(std::move(slice));
  auto slices = parameter_slices(*this);
  std::move(others.begin(), others.end(), std::back_inserter(slices));
  return slices;
}

void Pipeline::slices_written() {
  for (const auto& [number, stage] : state_->stages) stage->engine().slices_written();
}

void Pipeline::sum(at::Tensor& numbers) const {
  state_->pipeline().all_reduce(numbers).wait();
  state_->stages.begin()->second->engine().sum(numbers);
}

void Pipeline::require_gradients() const {
  for (const auto& [number, stage] : state_->stages) stage->engine().require_gradients();
}

void Pipeline::spend_gradients(const GradientUse& use) {
  for (const auto& [number, stage] : state_->stages) stage->engine().spend_gradients(use);
}

void Pipeline::updated(std::size_t part) {
  for (const auto& [number, stage] : state_->stages) {
    const auto count = stage->engine().flats().size();
    if (part < count) return stage->engine().updated(part);
    part -= count;
  }
}

void Pipeline::finish_update() {
  for (const auto& [number, stage] : state_->stages) stage->engine().finish_update();
}

}  // namespace bonfire
