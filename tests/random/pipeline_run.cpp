#include "tests/random/pipeline_run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipeline.h"
#include "tests/random/optimizer_of.h"
#include "tests/random/own_options.h"
#include "tests/random/pipeline_work.h"
#include "tests/random/recomputed.h"
#include "tests/random/refusal.h"
#include "tests/random/wrapping_of.h"

namespace bonfire::cases {
namespace {

Chain chain_of(const PipelineCase& each, const PlainPipeline& plain) {
  Chain chain;
  for (std::size_t unit = 0; unit < each.units.size(); ++unit) chain.units.push_back(fmt::format("u{}", unit));
  chain.build = [&each](UnitRange units) {
    auto row = std::make_shared<RowImpl>(each, units, /*plain=*/false);
    return StageModule{
        row, [row](Tensors values, const Microbatch& microbatch) { return row->forward(std::move(values), microbatch); }};
  };
  // Under the names of the oracle, where all uses of a weight are one tensor.
  std::map<std::string, TiedWeight> tied;
  for (const auto& [name, first] : plain.names) tied[first].uses.push_back({std::stoi(name.substr(1)), name});
  Draw draw(Random(each.seed).fork("uses"));
  for (auto& [name, weight] : tied) {
    if (weight.uses.size() < 2) continue;
    TiedWeight mixed;
    for (const int at : draw.permutation(static_cast<int>(weight.uses.size())))
      mixed.uses.push_back(weight.uses[static_cast<std::size_t>(at)]);
    chain.tied.insert(chain.tied.begin() + draw.below(static_cast<int>(chain.tied.size()) + 1), mixed);
  }
  return chain;
}

std::vector<Microbatch> weighed_batch(const PipelineCase& each, int event, int data_rank) {
  auto batch = batch_of(each, event, data_rank);
  if (each.classes)
    for (auto& microbatch : batch) microbatch.weight = weight_of(each, microbatch);
  return batch;
}

PipelineOptions options_of(const PipelineCase& each, const PlainPipeline& plain) {
  PipelineOptions options{.schedule = each.table.table, .schedule_name = each.table.name};
  if (!each.stages.empty()) {
    int begin = 0;
    for (const int count : each.stages) options.stages.push_back({begin, begin + count}), begin += count;
  }
  options.receive_ahead = each.receive_ahead;
  options.resident = each.resident;
  options.shard.what = each.options.what;
  if (each.options.full_accumulation) options.shard.accumulation = Accumulation::full;
  options.shard.offload = each.options.offload;
  if (each.options.bucket_bytes > 0)
    options.shard.buckets = {.bucket_bytes = each.options.bucket_bytes,
                             .first_bucket_bytes = each.options.first_bucket_bytes};
  if (each.options.reshard_ranks > 0)
    options.shard.reshard_after_forward = each.options.reshard_ranks;
  else if (each.gathers_units)
    options.shard.reshard_after_forward = each.options.reshard;
  options.shard.prefetch = each.options.prefetch;
  if (each.options.prefetch_after_reduction) options.shard.backward_prefetch = BackwardPrefetch::after_reduction;
  if (each.options.wrap != Wrap::ignored || !plain.chosen.empty())
    options.shard.wrapping = wrapping_of(each.options.wrap, plain.chosen);
  options.shard.negotiate_order = each.options.negotiate;
  options.shard.start = each.options.broadcast ? Start::broadcast : Start::check;
  options.shard.debug = each.options.debug;
  options.shard.versions = each.options.versions;
  if (each.options.own_options) options.shard.unit = own_options(each.seed);
  options.shard.log = Log::silent();
  return options;
}

class PipelineTrainee {
 public:
  PipelineTrainee(const PipelineCase& each, const PlainPipeline& plain, const World& world)
      : each_(each),
        plain_(plain),
        mesh_(world.mesh({.pipeline = each.table.ranks, .replicate = each.replicate, .shard = each.shard})) {
    auto options = options_of(each, plain);
    if (each.example) options.example = weighed_batch(each, 0, 0).front();
    pipeline_.emplace(mesh_, chain_of(each, plain), options);
    optimizer_ = optimizer_of(each.update, *pipeline_);
    for (const int stage : pipeline_->local_stages()) in_cells_[stage] = optimizer_of(each.update, pipeline_->engine(stage));
    for (const int stage : pipeline_->local_stages())
      recomputed_.push_back(recomputed_units(pipeline_->module(stage), each.options.recompute, each.seed, /*leaves=*/false));
  }

  void run() {
    for (int at = 0; at < static_cast<int>(plain_.events.size()); ++at) {
      event(at);
      compare_weights(at);
    }
    for (const int stage : pipeline_->local_stages()) pipeline_->engine(stage).check_equal();
  }

 private:
  void event(int at) {
    const auto& event = each_.script[static_cast<std::size_t>(at)];
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    switch (event.act) {
      case PipelineAct::train: {
        for (const int stage : pipeline_->local_stages()) freeze(each_, pipeline_->module(stage), plain_, event.frozen);
        must_ask_for_weights(at, [&](const auto& batch) { pipeline_->step(batch); });
        Pipeline::RunOptions how;
        if (each_.update_in_cells) how.update = [&](int stage) { in_cells_.at(stage)->step(); };
        compare(at, pipeline_->step(weighed_batch(each_, at, mesh_.coordinate(Axis::data)), how));
        if (each_.update_in_cells) return;
        const auto result = step();
        if (each_.update.clip > 0 &&
            !(std::abs(result.gradient_norm - record.norm) <= record.tolerance * std::max(0.1, record.norm)))
          throw Mismatch(fmt::format("event {}: the norm of the gradients is {}, of plain torch {}", at,
                                     result.gradient_norm, record.norm));
        return;
      }
      case PipelineAct::evaluate:
        must_ask_for_weights(at, [&](const auto& batch) { pipeline_->evaluate(batch); });
        return compare(at, pipeline_->evaluate(weighed_batch(each_, at, mesh_.coordinate(Axis::data))));
      case PipelineAct::step_alone: try { step();
        } catch (const std::exception& error) {
          if (is_timeout(error.what())) throw;
          return;
        }
        throw Mismatch(fmt::format("event {}: an update without a step was not refused", at));
    }
  }

  // Where every rank has masked targets: those that have none would go on, and hear that the others cannot.
  template <class Run>
  void must_ask_for_weights(int at, const Run& run) {
    if (!each_.classes || !each_.script[static_cast<std::size_t>(at)].forgets_weights) return;
    for (int rank = 0; rank < each_.data_ranks(); ++rank) {
      const auto batch = batch_of(each_, at, rank);
      const auto is_masked = [](const Microbatch& one) { return one.target[0].eq(masked).any().item<bool>(); };
      if (std::none_of(batch.begin(), batch.end(), is_masked)) return;
    }
    try {
      run(batch_of(each_, at, mesh_.coordinate(Axis::data)));
    } catch (const std::exception& error) {
      const std::string words = error.what();
      if (words.find("Microbatch::weight") != std::string::npos) return;
      throw;
    }
    throw Mismatch(fmt::format("event {}: masked targets without weights were not refused", at));
  }

  StepResult step() { return optimizer_->step({.clip = each_.update.clip}); }

  void compare(int at, const PipelineReport& report) {
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    const auto& data = mesh_.group(Axis::data);
    const double weight = record.weights_of_ranks[static_cast<std::size_t>(data.rank())];
    const auto look = [&](const char* what, double mine, double should_be) {
      const double all = data.sum(each_.classes ? weight : 1);
      const double is = all == 0 ? 0 : data.sum(each_.classes ? mine * weight : mine) / all;
      if (!(std::abs(is - should_be) <= record.tolerance * std::max(1.0, std::abs(should_be))))
        throw Mismatch(fmt::format("event {}: the {} is {}, of plain torch {}", at, what, is, should_be));
    };
    look("loss", report.loss, record.loss);
    look("report", report.reports.at(0), record.report);
  }

  void compare_weights(int at) {
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    double worst = 0;
    std::string where;
    for (const int stage : pipeline_->local_stages()) {
      const auto whole = pipeline_->engine(stage).full_parameters();
      for (const auto& item : pipeline_->module(stage).named_parameters()) {
        const double away = distance(item.value().detach(), record.weights.at(item.key()));
        if (away > worst) worst = away, where = item.key();
      }
    }
    if (worst > record.tolerance)
      throw Mismatch(fmt::format("after event {}: '{}' is {:.1e} of its size away from plain torch", at, where, worst));
  }

  const PipelineCase& each_;
  const PlainPipeline& plain_;
  Mesh mesh_;
  std::optional<Pipeline> pipeline_;
  std::unique_ptr<Optimizer> optimizer_;  // of all stages,
  std::vector<RecomputedUnits> recomputed_;
  std::map<int, std::unique_ptr<Optimizer>> in_cells_;  // or of each, where the table says when
};

}  // namespace

std::string run_pipeline_case(const PipelineCase& each) {
  at::set_num_threads(1);
  PlainPipeline plain;
  try {
    plain = run_plainly(each);
  } catch (const std::exception& error) {
    return fmt::format("{} plain torch throws: {}", no_case, first_line(error.what()));
  }
  const Verdict verdict = verdict_of(each);
  return run_and_judge(each.ranks(), [&](World& world) {
    return judge<PipelineTrainee>(verdict, "Pipeline()",
                                  [&](std::optional<PipelineTrainee>& trainee) { trainee.emplace(each, plain, world); });
  });
}

}  // namespace bonfire::cases
