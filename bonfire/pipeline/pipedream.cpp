#include "bonfire/pipeline/pipedream.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/data_groups.h"
#include "bonfire/comm/hear.h"
#include "bonfire/pipeline/executor.h"
#include "bonfire/pipeline/form.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/pipeline/microbatch_weights.h"
#include "bonfire/pipeline/pipedream_row.h"
#include "bonfire/pipeline/stage.h"
#include "bonfire/pipeline/stage_wrappings.h"
#include "bonfire/pipeline/tied.h"
#include "bonfire/pipeline/weight_versions.h"
#include "bonfire/schedule/lowering.h"
#include "bonfire/schedule/validate.h"
#include "bonfire/shard/engine_memory.h"

namespace bonfire {
namespace {

using schedule::Kind;
using schedule::RoundRobin;
using schedule::WeightMode;

// Gradients of all microbatches of a minibatch are summed over the replicas that share them. (Where each replica has
// minibatches of its own, they are averaged.)
class SumOverReplicas final : public Reduction {
 public:
  explicit SumOverReplicas(Group replicas) : replicas_(std::move(replicas)) {}

  void begin(std::size_t bucket, FlatParameter& flat) override {
    works_.resize(std::max(works_.size(), bucket + 1));
    for (const auto& share : flat.trained()) works_[bucket].push_back(replicas_.all_reduce(share.gradient, Reduce::sum));
  }
  void end(std::size_t bucket, FlatParameter&) override {
    for (auto& work : works_.at(bucket)) work.wait();
    works_[bucket].clear();
  }
  void reset() override { works_.clear(); }

 private:
  Group replicas_;
  std::vector<std::vector<Work>> works_;
};

bool shares_minibatches(const RoundRobin& robin) {
  return robin.mode == WeightMode::two_buffers || robin.mode == WeightMode::flush;
}

std::vector<UnitRange> ranges_of(const Chain& chain, const PipeDreamOptions& options) {
  const int units = static_cast<int>(chain.units.size()), stages = static_cast<int>(options.robin.replicas.size());
  if (options.stages.empty()) return split_evenly(units, stages);
  if (static_cast<int>(options.stages.size()) != stages)
    fail_config("replicas are given for {} stages, and {} stages", stages, options.stages.size());
  std::vector<int> counts;
  for (const auto& range : options.stages) counts.push_back(range.count());
  return split_as_told(units, counts);
}

void require_kept(const Mesh& mesh, const Chain& chain, const PipeDreamOptions& options,
                  const std::vector<UnitRange>& ranges) {
  const auto& shape = mesh.shape();
  const auto name = schedule::name_of(options.robin.mode);
  if (shape.pipeline != options.robin.ranks())
    fail_config("schedule {}: replicas {} are {} ranks; the mesh has {} along the pipeline", name,
                fmt::join(options.robin.replicas, ","), options.robin.ranks(), shape.pipeline);
  if (shape.size() != shape.pipeline)
    fail_config("schedule {} on a mesh of {} ranks with {} along the pipeline; allowed: no other axis", name, shape.size(),
                shape.pipeline);
  if (options.shard.what != Sharded::none || options.shard.offload != Offload::none || options.shard.hook ||
      options.shard.versions != 1)
    fail_config(
        "schedule {}: replicas hold whole stages, and their versions and reductions are the schedule's; allowed: sharded = "
        "none, offload = none, no hook and versions = 1",
        name);
  for (const auto& group : tie_groups(chain, ranges))
    fail_config(
        "schedule {}: weight '{}' is tied over stages {}, which are updated at different times; allowed: tied "
        "weights on one stage",
        name, group.in_model.front(), fmt::join(group.stages, ", "));
  if (!options.stash && options.robin.mode != WeightMode::stashing)
    fail_config("schedule {} without stashing: there are no versions to hold; allowed: pipedream", name);
}

}  // namespace

std::int64_t most_without_drain(const RoundRobin& robin) { return (std::int64_t{1} << 30) / robin.microbatches; }

schedule::Schedule pipedream_table(const RoundRobin& robin) {
  const std::string name(schedule::name_of(robin.mode));
  // Long enough for all that happens in a full pipeline.
  const auto endless = schedule::endless(robin, {.reductions = true});
  auto table = schedule::unrolled(endless, 1);
  schedule::validate(table, name, {.many_updates = true});
  const auto versions = schedule::versions_of(table, robin.mode, name);
  for (std::size_t rank = 0; rank < table.rows.size(); ++rank)
    for (std::size_t cell = 0; cell < table.rows[rank].size(); ++cell) {
      const auto& action = table.rows[rank][cell];
      if (action.kind != Kind::forward && action.kind != Kind::backward) continue;
      const int formula = schedule::version_of(robin, action.stage, action.microbatch);
      require(versions.of[rank][cell] == formula, "schedule {}: rank {}, '{}': the table has version {} and the formula {}",
              name, rank, schedule::to_text(action), versions.of[rank][cell], formula);
    }
  for (std::size_t rank = 0; rank < table.rows.size(); ++rank) {
    const int stage = table.rows[rank].front().stage, kept = schedule::most_versions(robin, stage);
    require(versions.held[rank] <= kept, "schedule {}: rank {} needs {} versions of stage {} at once, and keeps {}", name,
            rank, versions.held[rank], stage, kept);
  }
  return table;
}

struct PipeDream::State {
  State(const Mesh& on, Chain given, PipeDreamOptions asked);

  const Group& ranks() const { return mesh.group(Axis::pipeline); }
  int me() const { return mesh.coordinate(Axis::pipeline); }
  std::vector<int> holders(int stage) const;
  void agree(const Microbatch& example);
  std::string probe(const Crossing& incoming, Tensors& values, const Microbatch& example);
  ShardOptions options_for_stage() const;
  Stage& stage() { return *stages.at(number); }
  Executor::Step step();
  void observe(const schedule::Action& action, bool begins);
  void update();
  void run(const std::vector<Executor::Cell>& cells);
  void forget_old();
  MicrobatchWeights weigh(const std::vector<Microbatch>& given) const;

  Mesh mesh;
  Chain chain;
  PipeDreamOptions options;
  std::vector<UnitRange> ranges;
  schedule::Schedule table;
  int number = 0;  // of this rank's stage
  int kept = 1;    // versions
  at::Device device = at::kCPU;
  Group replicas{};
  std::unique_ptr<Ties> ties;
  Executor::Stages stages;
  std::unique_ptr<Links> links;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<WeightVersions> weights;
  PipeDreamRow row;
  std::function<void(const StageUpdate&)> on_update;
  CellObserver on_cell;

  // Numbers of this run through the pipeline, from empty to empty.
  std::vector<Microbatch> microbatches;  // from `first` on
  std::vector<double> parts;             // of their minibatch
  int first = 0;
  int here = 0;             // minibatches of it
  std::int64_t before = 0;  // minibatches of those before
  std::int64_t updates = 0, drains = 0;
  std::map<std::int64_t, double> losses;
  int peak = 0;
};

PipeDream::State::State(const Mesh& on, Chain given, PipeDreamOptions asked)
    : mesh(on),
      chain(std::move(given)),
      options(std::move(asked)),
      ranges(ranges_of(chain, options)),
      table(pipedream_table(options.robin)),
      row(options.robin, mesh.coordinate(Axis::pipeline), options.receive_ahead) {
  require_kept(mesh, chain, options, ranges);
  const auto& robin = options.robin;
  while (me() >= robin.first_rank(number) + robin.replicas[static_cast<std::size_t>(number)]) ++number;
  kept = schedule::most_versions(robin, number);
  // Without stashing an update still leaves what a forward has saved as it was.
  if (!options.stash) kept = std::min(kept, 2);
  const auto holding = holders(number);
  replicas = mesh.pipeline_subgroup(holding, fmt::format("replicas of stage {}", number));
  const Stage::Place place{
      .number = number, .stages = static_cast<int>(ranges.size()), .units = ranges[static_cast<std::size_t>(number)]};
  const auto together = [&](const std::function<void()>& what) {
    do_or_fail_together(ranks(), [&] {
      try {
        what();
      } catch (const ConfigError& error) {
        fail_config("{}: {}", place.name(), error.what());
      } catch (const std::exception& error) {
        fail("{}: {}", place.name(), error.what());
      }
    });
  };
  StageModule built;
  together([&] {
    built = chain.build(place.units);
    if (const auto parameters = built.module->parameters(); !parameters.empty()) device = parameters.front().device();
  });
  options.shard.wrapping =
      wrappings_of_stages(ranks(), {{number, built.module.get()}}, options.shard.wrapping, device).at(number);
  Chain untied = chain;
  untied.tied.clear();
  ties = std::make_unique<Ties>(mesh, untied, ranges, table);
  together([&] {
    DataGroups groups;
    groups.all = groups.replicas = replicas;
    stages.emplace(
        number, std::make_unique<Stage>(place, built, groups, options_for_stage(), std::make_shared<EngineMemory>(device)));
  });
  weights = std::make_unique<WeightVersions>(stage().driver(), WeightVersions::Options{place.name(), options.stash});
  links = std::make_unique<Links>(mesh, table, device);
  executor = std::make_unique<Executor>(stages, *links, *ties);
  agree(options.example);
}

std::vector<int> PipeDream::State::holders(int stage) const {
  std::vector<int> ranks;
  for (int replica = 0; replica < options.robin.replicas[static_cast<std::size_t>(stage)]; ++replica)
    ranks.push_back(options.robin.first_rank(stage) + replica);
  return ranks;
}

ShardOptions PipeDream::State::options_for_stage() const {
  auto shard = options.shard;
  shard.versions = kept;
  if (shares_minibatches(options.robin) && replicas.size() > 1) shard.hook = std::make_shared<SumOverReplicas>(replicas);
  return shard;
}

std::string PipeDream::State::probe(const Crossing& incoming, Tensors& values, const Microbatch& example) {
  try {
    stage().driver().unshard();
    values = stage().probe({.incoming = incoming}, values, example);
    stage().driver().reshard();
    return fmt::format("ok {}", to_words(stage().outgoing(form_of(example))));
  } catch (const ConfigError& error) {
    return error.what();
  } catch (const std::exception& error) {
    const std::string words = error.what();
    return fmt::format("{}: forward failed on what came in, {}: {}", stage().name(), to_string(incoming),
                       words.substr(0, words.find('\n')));
  }
}

// Stage by stage: all replicas see what the first one of the stage before has made, and all ranks hear what goes out.
void PipeDream::State::agree(const Microbatch& example) {
  Crossing incoming;
  Tensors values = example.input;
  for (int at = 0; at < static_cast<int>(ranges.size()); ++at) {
    std::string words;
    if (at == number) {
      for (auto& value : values)
        if (at > 0) replicas.broadcast(value, 0).wait();
      words = probe(incoming, values, example);
    }
    const int speaker = options.robin.first_rank(at);
    words = hear(ranks(), words, speaker, device);
    if (!words.starts_with("ok ")) fail_config("{}", words);
    incoming = from_words(words.substr(3));
    if (at + 1 == static_cast<int>(ranges.size())) break;
    const int listener = options.robin.first_rank(at + 1);
    if (me() == speaker) links->send(values, listener).wait();
    if (number == at + 1) values = links->room(incoming, example.samples(), -1);
    if (me() == listener) links->receive(values, speaker).wait();
  }
}

Executor::Step PipeDream::State::step() {
  return {.microbatches = microbatches,
          .weights = parts,
          .update = [this](int) { update(); },
          .observe = [this](const schedule::Action& action, bool begins) { observe(action, begins); },
          .first = first,
          .report =
              [this](int microbatch, const at::Tensor& numbers) {
                // What weighs nothing is left out, whatever it is: torch's mean over no targets is not a number.
                if (const double part = parts[static_cast<std::size_t>(microbatch - first)]; part > 0)
                  losses[before + microbatch / options.robin.microbatches] += part * numbers[0].item<double>();
              }};
}

void PipeDream::State::observe(const schedule::Action& action, bool begins) {
  const bool forward = action.kind == Kind::forward;
  if (begins && on_cell) on_cell(action, true);
  if (forward || action.kind == Kind::backward) {
    if (!begins)
      weights->end();
    else if (forward)
      weights->begin_forward(action.microbatch, schedule::version_of(options.robin, number, action.microbatch));
    else
      weights->begin_backward(action.microbatch);
  }
  if (!begins && on_cell) on_cell(action, false);
  if (!begins && forward) peak = std::max(peak, stage().live());
}

void PipeDream::State::update() {
  const auto& robin = options.robin;
  const bool in_turn = !shares_minibatches(robin);
  const int round = in_turn ? robin.replicas[static_cast<std::size_t>(number)] : 1;
  const int local = weights->updates();
  const int first_of_round = local * round, own = first_of_round + (in_turn ? me() - robin.first_rank(number) : 0);
  // What was really used, beside what the mode says of this replica's part of the update. Weights that never change are
  // never old.
  const int formula = weights->changes() ? local - schedule::version_of(robin, number, own * robin.microbatches) : 0;
  require(weights->staleness() == formula, "{}: update {} has gradients of weights {} updates old; schedule {} says {}",
          stage().name(), updates, weights->staleness(), schedule::name_of(robin.mode), formula);
  require(on_update != nullptr, "an update of {} and nobody who makes it: see PipeDream::on_update", stage().name());
  on_update({.number = updates, .minibatch = before + first_of_round + round - 1, .staleness = weights->staleness()});
  weights->updated();
  ++updates;
}

void PipeDream::State::run(const std::vector<Executor::Cell>& cells) {
  const auto how = step();
  try {
    for (const auto& cell : cells) executor->execute(cell, row.place(cell.action), how);
  } catch (const std::exception& error) {
    weights->forget();
    executor->forget(error.what());
    throw;
  }
}

// What nobody reads any more.
void PipeDream::State::forget_old() {
  const int window = row.window(), end = first + static_cast<int>(microbatches.size());
  executor->gradients_received(end - 1 - window);
  const int old = std::clamp(end - window - first, 0, static_cast<int>(microbatches.size()));
  microbatches.erase(microbatches.begin(), microbatches.begin() + old);
  parts.erase(parts.begin(), parts.begin() + old);
  first += old;
}

// Ranks are given the same. If they were not, one that refuses it would leave the others waiting.
MicrobatchWeights PipeDream::State::weigh(const std::vector<Microbatch>& given) const {
  try {
    return weights_of(given);
  } catch (const std::exception& error) {
    mesh.group(Axis::world).all_failed_alike(error.what(), before + here, options.shard.patience);
    throw;
  }
}

PipeDream::PipeDream(const Mesh& mesh, Chain chain, PipeDreamOptions options)
    : state_(std::make_unique<State>(mesh, std::move(chain), std::move(options))) {}
PipeDream::~PipeDream() = default;
PipeDream::PipeDream(PipeDream&&) noexcept = default;
PipeDream& PipeDream::operator=(PipeDream&&) noexcept = default;

void PipeDream::on_update(std::function<void(const StageUpdate&)> update) { state_->on_update = std::move(update); }
void PipeDream::on_cell(CellObserver observe) { state_->on_cell = std::move(observe); }

void PipeDream::admit(const std::vector<Microbatch>& minibatch) {
  auto& state = *state_;
  const int each = state.options.robin.microbatches;
  require(static_cast<int>(minibatch.size()) == each, "a minibatch of {} microbatches; schedule {} is for {}",
          minibatch.size(), schedule::name_of(state.options.robin.mode), each);
  const auto weights = state.weigh(minibatch);
  require(weights.said || weights.total > 0, "a minibatch without samples");
  const auto most = most_without_drain(state.options.robin);
  require(state.here < most, "{} minibatches have been admitted since the last drain; allowed: up to {}", state.here, most);
  if (state.here == 0) {
    state.stage().driver().begin_step();
    // Something may have been loaded, or frozen, since the last run.
    state.weights->restart();
  }
  state.forget_old();
  state.microbatches.insert(state.microbatches.end(), minibatch.begin(), minibatch.end());
  state.parts.insert(state.parts.end(), weights.each.begin(), weights.each.end());
  ++state.here;
  state.run(state.row.admit(state.here));
}

bool PipeDream::can_drain() const { return state_->here % state_->options.robin.round() == 0; }
bool PipeDream::empty() const { return state_->here == 0; }
std::int64_t PipeDream::admitted() const { return state_->before + state_->here; }
std::int64_t PipeDream::drains() const { return state_->drains; }
std::int64_t PipeDream::updates() const { return state_->updates; }
int PipeDream::minibatches_on_their_way() const {
  const int each = state_->options.robin.microbatches;
  return (state_->row.window() + each - 1) / each;
}

void PipeDream::drain() {
  auto& state = *state_;
  if (empty()) return;
  require(can_drain(), "a drain after {} minibatches; allowed: whole rounds of all replicas, a multiple of {}", state.here,
          state.options.robin.round());
  state.run(state.row.drain(state.here));
  state.executor->finish();
  state.row.restart();
  state.microbatches.clear();
  state.parts.clear();
  state.first = 0;
  state.before += std::exchange(state.here, 0);
  ++state.drains;
}

double PipeDream::take_loss(std::int64_t minibatch) {
  const auto node = state_->losses.extract(minibatch);
  return node.empty() ? 0 : node.mapped();
}

double PipeDream::evaluate(const std::vector<Microbatch>& microbatches) {
  auto& state = *state_;
  require(empty(), "an evaluation while minibatches are on their way: drain() first");
  require(!microbatches.empty(), "an evaluation of no microbatches");
  const auto weights = state.weigh(microbatches);
  const at::NoGradGuard no_grad;
  const auto& robin = state.options.robin;
  schedule::Schedule forwards{static_cast<int>(state.ranges.size()), static_cast<int>(microbatches.size()),
                              std::vector<std::vector<schedule::Action>>(static_cast<std::size_t>(robin.ranks()))};
  // As in training, so that messages go where there are links.
  for (std::int32_t number = 0; number < forwards.microbatches; ++number)
    for (std::int32_t stage = 0; stage < forwards.stages; ++stage)
      forwards.rows[static_cast<std::size_t>(robin.rank_of(stage, number))].push_back({stage, Kind::forward, number});
  Executor executor(schedule::lower(std::move(forwards), {.receive_ahead = state.options.receive_ahead}), state.me(),
                    state.stages, *state.links, *state.ties);
  state.stage().driver().unshard();
  auto sums = executor.run({.microbatches = microbatches, .weights = weights.each});
  state.stage().driver().reshard();
  auto mean = at::zeros({1}, at::TensorOptions(at::kDouble).device(state.device));
  if (sums.defined()) mean.copy_(sums.narrow(0, 0, 1));
  state.ranks().all_reduce(mean).wait();
  return mean.item<double>();
}

const schedule::RoundRobin& PipeDream::robin() const { return state_->options.robin; }
const std::vector<UnitRange>& PipeDream::stages() const { return state_->ranges; }
int PipeDream::stage() const { return state_->number; }
Engine& PipeDream::engine() { return state_->stage().engine(); }
torch::nn::Module& PipeDream::module() { return state_->stage().module(); }
int PipeDream::versions() const { return state_->kept; }
int PipeDream::peak_activations() const { return state_->peak; }

std::vector<Slice> PipeDream::slices() {
  std::vector<Slice> others;
  for (auto& slice : engine().slices())
    if (slice.kind != "value") others.push_back(std::move(slice));
  auto slices = parameter_slices(*this);
  std::move(others.begin(), others.end(), std::back_inserter(slices));
  return slices;
}
void PipeDream::slices_written() { engine().slices_written(); }

std::vector<Shares::Part> PipeDream::parts() const {
  std::vector<Part> parts;
  for (const auto& flat : state_->stage().engine().flats()) parts.push_back({.flat = flat.get(), .stage = state_->number});
  return parts;
}
std::int64_t PipeDream::layout_version() const { return state_->stage().engine().layout_version(); }
Shares::Division PipeDream::division() const {
  auto division = state_->stage().engine().division();
  division.stage = state_->number;
  return division;
}
at::Device PipeDream::device() const { return state_->device; }
void PipeDream::sum(at::Tensor& numbers) const { state_->stage().engine().sum(numbers); }
void PipeDream::require_gradients() const { state_->stage().engine().require_gradients(); }
void PipeDream::spend_gradients(const GradientUse& use) { state_->stage().engine().spend_gradients(use); }
void PipeDream::updated(std::size_t part) { state_->stage().engine().updated(part); }
void PipeDream::finish_update() { state_->stage().engine().finish_update(); }

}  // namespace bonfire
