#include "bonfire/plan/pipeline.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/plan/tensor_part.h"
#include "bonfire/plan/unit_window.h"

namespace bonfire::plan {
namespace {

using schedule::Action;
using schedule::Kind;

bool shares(const ModelDescription& part) {
  return std::any_of(part.units.begin(), part.units.end(), [](const auto& unit) { return !unit.shared.empty(); });
}

// Stages that hold a copy of the root's parameters; one stage alone holds them as its own.
std::vector<int> tied_stages(const ModelDescription& model, const PipelineLayout& layout) {
  std::vector<int> stages;
  for (int stage = 0; stage < static_cast<int>(layout.stages.size()); ++stage)
    if (shares(stage_model(model, layout, stage))) stages.push_back(stage);
  return stages;
}

class Row {
 public:
  Row(const ModelDescription& model, const PipelineLayout& layout, int rank)
      : model_(model), layout_(layout), factors_(layout.data.factors()), tied_(tied_stages(model, layout)) {
    const auto& row = layout.table.rows.at(static_cast<std::size_t>(rank));
    // Whether tied weights are trained on all of their stages: two numbers for each.
    if (tied_.size() > 1)
      add(CollectiveKind::all_reduce, Axis::pipeline, 8 * static_cast<std::int64_t>(model.units.front().parameters.size()),
          layout.table.ranks());
    // The rank that has the loss.
    if (layout.weighs && schedule::Index(layout.table).find(Kind::forward, layout.table.stages - 1, 0).rank == rank)
      add(CollectiveKind::all_reduce, Axis::data, 8, layout.data.ranks());
    for (std::size_t at = 0; at < row.size(); ++at) add(row, at);
    add(CollectiveKind::broadcast, Axis::pipeline, 8 * layout.reports, layout.table.ranks());
    add(CollectiveKind::all_reduce, Axis::data, 8, layout.data.ranks());  // the loss
    if (layout.data.clip) {
      add(CollectiveKind::all_reduce, Axis::pipeline, 8, layout.table.ranks());
      add(CollectiveKind::all_reduce, Axis::shard, 8, factors_.optimizer);
      add(CollectiveKind::all_reduce, Axis::tensor, 8, model.tensor.ranks);
    }
    for (const auto& [stage, flats] : flats_)
      for (const auto& collective : collectives_of_update(flats, layout.data)) list_.push_back(collective);
  }

  std::vector<Collective> list() && { return std::move(list_); }

 private:
  const std::vector<FlatLayout>& flats(int stage) {
    auto& flats = flats_[stage];
    if (flats.empty()) flats = flats_of_stage(model_, layout_, stage);
    return flats;
  }

  void add(const std::vector<Action>& row, std::size_t at) {
    const Action& action = row[at];
    const auto bytes = [&](int stage) { return crossing_bytes(model_, layout_, stage, action.microbatch); };
    switch (action.kind) {
      case Kind::send_forward: return add(CollectiveKind::send, Axis::pipeline, bytes(action.stage), 2);
      case Kind::send_backward: return add(CollectiveKind::send, Axis::pipeline, bytes(action.stage - 1), 2);
      case Kind::receive_forward: return add(CollectiveKind::receive, Axis::pipeline, bytes(action.stage - 1), 2);
      case Kind::receive_backward: return add(CollectiveKind::receive, Axis::pipeline, bytes(action.stage), 2);
      case Kind::unshard:
        for (const auto& flat : flats(action.stage))
          add(CollectiveKind::all_gather, Axis::shard, flat.bytes, factors_.parameters);
        return;
      case Kind::forward:
      case Kind::backward: exchange(action); return compute(action);
      case Kind::input_gradient: return exchange(action);
      case Kind::reduce: return reduce(action.stage, last_reduction(row, at));
      case Kind::tie: return tie(action);
      default: flats(action.stage);
    }
  }

  // Among the ranks that split the layers, and those that share samples.
  void exchange(const Action& action) {
    if (model_.tensor.ranks == 1 && layout_.data.context.ranks == 1) return;
    const auto part = stage_model(model_, layout_, action.stage);
    const auto units = units_of_stage(model_, layout_, action.stage, flats(action.stage));
    const auto samples = layout_.samples.at(static_cast<std::size_t>(action.microbatch));
    const Exchange how{.tokens = layout_.tokens * samples,
                       .samples = samples,
                       .element_bytes = bytes_of(layout_.data.compute),
                       .context = layout_.data.context};
    const bool before = trains_before(model_, layout_, action.stage);
    const auto append = [this](const std::vector<Collective>& exchanged) {
      list_.insert(list_.end(), exchanged.begin(), exchanged.end());
    };
    if (action.kind == Kind::forward)
      for (std::size_t at = 0; at < units.size(); ++at) append(exchanged_in_forward(part, at, how));
    else
      for (std::size_t at = units.size(); at-- > 0;)
        if (units[at].backward) append(exchanged_in_backward(part, at, how, input_differentiates(units, at, before)));
  }

  void compute(const Action& action) {
    const auto& flats = this->flats(action.stage);
    if (!layout_.gathers_units || !layout_.data.comes_and_goes()) return;
    auto window = windows_.find(action.stage);
    if (window == windows_.end()) {
      const UnitWindow::Events events{.gather =
                                          [this, &flats](std::size_t flat, std::int64_t) {
                                            add(CollectiveKind::all_gather, Axis::shard, flats[flat].bytes,
                                                factors_.parameters);
                                          },
                                      .let_go = [](std::size_t) {}};
      window = windows_
                   .try_emplace(action.stage, units_of_stage(model_, layout_, action.stage, flats),
                                backwards_of_stage(layout_, action.stage), layout_.data, events)
                   .first;
      window->second.begin(/*knows_order=*/true);
    }
    window->second.run(action.kind == Kind::backward);
  }

  static bool last_reduction(const std::vector<Action>& row, std::size_t at) {
    for (std::size_t later = at + 1; later < row.size(); ++later) {
      if (row[later].stage != row[at].stage) continue;
      if (row[later].kind == Kind::update) return true;
      if (row[later].kind == Kind::reduce) return false;
    }
    return true;
  }

  void reduce(int stage, bool last) {
    for (const auto& flat : flats(stage)) {
      const std::int64_t elements = flat.trained_elements();
      add(CollectiveKind::reduce_scatter, Axis::shard, elements * bytes_of(layout_.data.reduction), layout_.data.shard);
      if (!last) continue;
      for (const auto& region : flat.regions)
        if (region.trained)
          add(CollectiveKind::all_reduce, Axis::replicate,
              region.elements / layout_.data.shard * bytes_of(layout_.data.gradient), layout_.data.replicate);
    }
  }

  // Shares of the weights that every one of the tied stages has.
  void tie(const Action& action) {
    if (!summed_.insert(action.microbatch).second) return;
    std::set<int> ranks;
    const schedule::Index index(layout_.table);
    for (const int stage : tied_) ranks.insert(index.find(Kind::forward, stage, 0).rank);
    for (const auto& flat : flats(action.stage))
      for (const auto& region : flat.regions)
        if (region.trained && !region.tie.empty())
          add(CollectiveKind::all_reduce, Axis::pipeline,
              region.elements / factors_.optimizer * bytes_of(layout_.data.gradient), static_cast<int>(ranks.size()));
  }

  void add(CollectiveKind kind, Axis axis, std::int64_t bytes, int ranks) {
    if (ranks > 1 && bytes > 0) list_.push_back({kind, axis, bytes});
  }

  const ModelDescription& model_;
  const PipelineLayout& layout_;
  Factors factors_;
  std::vector<int> tied_;
  std::map<int, std::vector<FlatLayout>> flats_;  // of this rank's stages
  std::map<int, UnitWindow> windows_;             // of those whose Units are gathered one by one
  std::set<int> summed_;
  std::vector<Collective> list_;
};

}  // namespace

ModelDescription stage_model(const ModelDescription& model, const PipelineLayout& layout, int stage) {
  const auto& [begin, end] = layout.stages.at(static_cast<std::size_t>(stage));
  return part_of(model, begin, end);
}

std::vector<FlatLayout> flats_of_stage(const ModelDescription& model, const PipelineLayout& layout, int stage) {
  const auto part = stage_model(model, layout, stage);
  const auto& data = layout.data;
  const auto tied = tied_stages(model, layout);
  if (!shares(part) || tied.size() < 2) return flats_of(part, data);
  // Tied weights come first in the backward of a stage that ends with the head.
  auto groups = groups_in_backward_order(part);
  const auto root = std::find_if(groups.begin(), groups.end(), [](const auto& group) { return group.name.empty(); });
  for (auto& parameter : root->parameters) {
    parameter.placement.tie = parameter.name;
    parameter.placement.copy = static_cast<int>(std::find(tied.begin(), tied.end(), stage) - tied.begin());
  }
  if (part.units.back().kind == UnitKind::head) std::rotate(groups.begin(), root, root + 1);
  return flats_of(std::move(groups), data);
}

bool trains_before(const ModelDescription& model, const PipelineLayout& layout, int stage) {
  const auto trained = [](const ParameterDescription& parameter) { return parameter.trained; };
  const auto trains = [&](const UnitDescription& unit) {
    if (std::any_of(unit.parameters.begin(), unit.parameters.end(), trained)) return true;
    return std::any_of(unit.shared.begin(), unit.shared.end(), [&](const std::string& name) {
      const auto& root = model.units.front().parameters;
      return std::any_of(root.begin(), root.end(), [&](const auto& one) { return one.name == name && one.trained; });
    });
  };
  int at = 0;
  for (const auto& unit : model.units) {
    if (unit.kind == UnitKind::root || at++ >= layout.stages.at(static_cast<std::size_t>(stage)).begin) continue;
    if (trains(unit)) return true;
  }
  return false;
}

std::vector<StepUnit> units_of_stage(const ModelDescription& model, const PipelineLayout& layout, int stage,
                                     const std::vector<FlatLayout>& flats) {
  const bool before = trains_before(model, layout, stage);
  auto units = step_units(stage_model(model, layout, stage), flats);
  for (auto& unit : units) unit.backward = unit.backward || before;
  return units;
}

std::vector<bool> backwards_of_stage(const PipelineLayout& layout, int stage) {
  const auto& row =
      layout.table.rows[static_cast<std::size_t>(schedule::Index(layout.table).find(Kind::forward, stage, 0).rank)];
  std::vector<bool> backwards;
  for (const auto& action : row)
    if (action.stage == stage && (action.kind == Kind::forward || action.kind == Kind::backward))
      backwards.push_back(action.kind == Kind::backward);
  return backwards;
}

std::int64_t crossing_bytes(const ModelDescription& model, const PipelineLayout& layout, int stage, int microbatch) {
  const auto part = stage_model(model, layout, stage);
  const std::int64_t tokens = layout.tokens * layout.samples.at(static_cast<std::size_t>(microbatch));
  return handed_on(part, part.units.back(), tokens) * bytes_of(layout.data.compute);
}

std::vector<Collective> collectives_of_step(const ModelDescription& model, const PipelineLayout& layout, int rank) {
  return Row(model, layout, rank).list();
}

}  // namespace bonfire::plan
