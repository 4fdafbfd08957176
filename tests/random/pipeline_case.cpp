#include "tests/random/pipeline_case.h"

#include <algorithm>
#include <functional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/schedule/text.h"

namespace bonfire::cases {

using plan::Offload;
using plan::Sharded;

namespace {

PipelineEvent draw_event(Draw draw, const Model& model, bool first) {
  PipelineEvent event;
  if (draw.chance(30)) event.act = PipelineAct::evaluate;
  if (draw.chance(10)) event.act = PipelineAct::step_alone;
  if (first) event.act = draw.chance(90) ? PipelineAct::train : event.act;
  event.microbatches = draw.between(1, 6);
  event.samples = draw.between(1, 3);
  event.uneven = draw.chance(30);
  event.length = model.length;
  if (model.length > 0 && event.act == PipelineAct::evaluate && draw.chance(60)) event.length = draw.between(1, 6);
  event.lengths = model.length > 0 && draw.chance(15);
  if (draw.chance(10)) event.frozen = draw.between(1, 3);
  event.mask = draw.pick({Mask::none, Mask::some, Mask::some, Mask::microbatch, Mask::all});
  if (event.mask == Mask::all && !draw.chance(30)) event.mask = Mask::some;
  return event;
}

// The number of a weight that several Units use, by itself or in a table.
std::set<int> ties_of(const std::vector<Part>& units) {
  std::set<int> ties;
  for (const auto& unit : units)
    for (const auto* part : parts_of(unit))
      for (const auto& layer : part->layers)
        if (layer.tie >= 0) ties.insert(layer.tie);
  return ties;
}

// Two weights that two Units share, in any order on each.
void plant_ties(Draw draw, std::vector<Part>& units) {
  if (units.size() < 2 || !draw.chance(20)) return;
  const int first = draw.below(static_cast<int>(units.size()) - 1);
  for (const int at : {first, draw.between(first + 1, static_cast<int>(units.size()) - 1)}) {
    Part unit{.mark = draw.pick({Mark::alpha, Mark::plain})};
    for (const int tie : {0, 1})
      unit.layers.push_back({.op = draw.pick({Op::linear, Op::our_linear}), .bias = draw.chance(50), .tie = tie});
    unit.registration = draw.permutation(2);
    for (const int item : draw.permutation(2)) unit.calls.push_back({.item = item, .residual = draw.chance(50)});
    units[static_cast<std::size_t>(at)] = unit;
  }
}

void each_layer(Part& part, const std::function<void(Layer&)>& visit) {
  for (auto& layer : part.layers) visit(layer);
  for (auto& child : part.children) each_layer(child, visit);
}

bool has_cell(const schedule::Schedule& table, std::initializer_list<schedule::Kind> kinds) {
  return std::any_of(table.rows.begin(), table.rows.end(), [&](const auto& row) {
    return std::any_of(row.begin(), row.end(), [&](const schedule::Action& action) {
      return std::find(kinds.begin(), kinds.end(), action.kind) != kinds.end();
    });
  });
}

bool is_unit(const Part& part) { return part.mark != Mark::plain || part.sequence != Sequence::none; }

// Whether several Units of the model use a weight.
bool ties_units(const std::vector<Part>& units) {
  std::set<int> seen;
  for (const auto& unit : units)
    for (const int tie : ties_of({unit}))
      if (!seen.insert(tie).second) return true;
  return false;
}

bool has_type(const std::vector<Part>& units, Mark mark) {
  return std::any_of(units.begin(), units.end(), [&](const Part& unit) { return has_mark(unit, mark); });
}

// Drawn after everything else, which means what it did without them.
void draw_later_options(Draw draw, PipelineCase& each) {
  auto& options = each.options;
  options.prefetch = draw.chance(50) ? 2 : draw.between(0, 3);
  if (draw.chance(1)) options.prefetch = -1;
  options.prefetch_after_reduction = draw.chance(25);
  options.debug = draw.chance(10);
  options.own_options = draw.chance(20);
  options.broadcast = draw.chance(70);  // as unless said; weights are equal all the same
  if (draw.chance(1)) options.reshard_ranks = draw.between(1, 2);
  if (draw.chance(1)) options.versions = 2;
  if (draw.chance(1)) options.negotiate = true;
  for (auto& event : each.script) event.forgets_weights = draw.chance(20);
  if (!draw.chance(50)) return;
  each.gathers_units = true;
  options.reshard = !draw.chance(15);
  // Some are there to be refused; most are not.
  if (draw.chance(10)) return;
  using schedule::Kind;
  if (each.comes_and_goes() && has_cell(each.table.table, {Kind::input_gradient, Kind::unshard, Kind::reshard}))
    each.gathers_units = false;
  if (!each.comes_and_goes() || !each.gathers_units) return;
  std::set<int> seen;
  for (auto& unit : each.units) {
    if (!is_unit(unit)) unit.mark = Mark::alpha;
    const auto before = seen;
    each_layer(unit, [&](Layer& layer) {
      if (before.contains(layer.tie)) layer.tie = -1;
      if (layer.tie >= 0) seen.insert(layer.tie);
    });
  }
}

void draw_wrapping(Draw draw, PipelineCase& each) {
  auto& options = each.options;
  if (draw.chance(30))
    options.wrap = draw.pick({Wrap::types, Wrap::min_parameters, Wrap::predicate, Wrap::all_in_one, Wrap::ignored});
  if (draw.chance(2)) options.wrap = draw.pick({Wrap::types, Wrap::unknown_type, Wrap::two_at_once});
  // On some of the stages, normally.
  else if (options.wrap == Wrap::types && !has_type(each.units, Mark::beta))
    options.wrap = Wrap::ignored;
  // Of gathers Unit by Unit.
  if (each.comes_and_goes() && !(each.gathers_units && options.reshard) && !draw.chance(3))
    options.prefetch_after_reduction = options.debug = false;
}

}  // namespace

PipelineCase draw_pipeline_case(std::uint64_t seed) {
  Draw draw(Random(seed).fork("pipeline"));
  PipelineCase each;
  each.seed = seed;
  auto& options = each.options;
  const int pipeline = draw.pick({1, 2, 2, 2, 2, 4});
  const int data = pipeline == 4 ? 1 : draw.pick({1, 2, 2});
  each.shard = data > 1 && draw.chance(75) ? data : 1;
  each.replicate = data / each.shard;
  options.what = each.shard == 1 ? Sharded::none
                                 : draw.pick({Sharded::optimizer, Sharded::gradients, Sharded::gradients,
                                              Sharded::parameters, Sharded::parameters});
  options.full_accumulation = draw.chance(25);
  if (draw.chance(10))
    options.offload = options.what == Sharded::parameters || each.shard == 1
                          ? draw.pick({Offload::optimizer, Offload::parameters})
                          : Offload::optimizer;
  if (draw.chance(50))
    options.bucket_bytes = draw.pick({1, 200, 700}), options.first_bucket_bytes = draw.pick({1, 100, 300});
  const bool shares = each.shard > 1 && options.what >= Sharded::gradients && !options.full_accumulation;
  const bool gathers = (each.shard > 1 && options.what == Sharded::parameters) || options.offload == Offload::parameters;
  each.table = draw_table(draw.fork("table"),
                          {.ranks = pipeline, .most_stages = std::max(4, pipeline), .shares = shares, .gathers = gathers});
  each.model = draw_model(draw.fork("model"));
  each.model.root = {};
  if (each.model.length == 0 && draw.chance(60)) each.model.length = draw.between(1, 4);
  const ModelLimits limits{.conditions = false, .strange = false, .depth = 1};
  const int units = each.table.table.stages + draw.below(3);
  for (int unit = 0; unit < units; ++unit) each.units.push_back(draw_part(draw.fork("unit").fork(unit), limits));
  plant_ties(draw.fork("ties"), each.units);
  // A stage holds one tensor for all uses of a weight.
  for (auto& unit : each.units) each_layer(unit, [](Layer& layer) { layer.alias = false; });
  if (each.model.tokens) {
    auto& first = each.units.front();
    first = {.mark = Mark::alpha,
             .layers = {{.op = Op::table, .bias = false, .tie = draw.chance(50) ? 10 : -1}},
             .registration = {0},
             .calls = {{.item = 0, .residual = false}}};
  }
  each.units_reversed = draw.chance(30);
  each.classes = draw.chance(40);
  each.flags = draw.chance(25);
  each.example = draw.chance(30);
  if (draw.chance(30)) {
    each.stages.assign(static_cast<std::size_t>(each.table.table.stages), 1);
    for (int more = units - each.table.table.stages; more > 0; --more)
      ++each.stages[static_cast<std::size_t>(draw.below(each.table.table.stages))];
  }
  each.receive_ahead = draw.chance(70) ? 1 : draw.between(0, 3);
  each.resident = draw.chance(70) ? 2 : draw.between(1, 3);
  Draw update = draw.fork("update");
  each.update.rule = update.pick({Rule::sgd, Rule::sgd, Rule::adam, Rule::adamw});
  if (update.chance(30)) each.update.momentum = 0.9;
  if (update.chance(30)) each.update.weight_decay = 0.1;
  each.update_in_cells = update.chance(20);
  if (!each.update_in_cells && update.chance(40)) each.update.clip = update.pick({0.01, 0.3, 100.0});
  for (int at = 0, events = draw.between(1, 4); at < events; ++at)
    each.script.push_back(draw_event(draw.fork("events").fork(at), each.model, at == 0));
  draw_later_options(draw.fork("later"), each);
  draw_wrapping(draw.fork("wrapping"), each);
  each.options.recompute = draw.fork("recompute").pick({0, 0, 0, 1, 2, 3});
  return each;
}

namespace {

// Of stages whose Units gather themselves.
Verdict verdict_of_gathers(const PipelineCase& each) {
  using schedule::Kind;
  if (has_cell(each.table.table, {Kind::input_gradient, Kind::unshard, Kind::reshard})) return Verdict::refused;
  // What belongs to Units that are not chosen is part of none, as a stage is none itself.
  if (each.options.wrap != Wrap::every && each.options.wrap != Wrap::ignored) return Verdict::either;
  // A weight of several Units is part of none, on one stage and on several.
  if (ties_units(each.units)) return Verdict::refused;
  // What a plain module holds is part of no Unit; one that has no element of its own may hold Units alone.
  return std::all_of(each.units.begin(), each.units.end(), is_unit) ? Verdict::works : Verdict::either;
}

}  // namespace

Verdict verdict_of(const PipelineCase& each) {
  const auto& options = each.options;
  if (options.prefetch < 0 || options.versions > 1 || options.reshard_ranks > 0 || options.negotiate)
    return Verdict::refused;
  if (options.wrap == Wrap::unknown_type || options.wrap == Wrap::two_at_once ||
      (options.wrap == Wrap::types && !has_type(each.units, Mark::beta)))
    return Verdict::refused;
  if (each.comes_and_goes() && !(each.gathers_units && options.reshard) &&
      (options.prefetch_after_reduction || options.debug))
    return Verdict::refused;
  if (each.gathers_units && each.options.reshard && each.comes_and_goes())
    if (const auto verdict = verdict_of_gathers(each); verdict != Verdict::works) return verdict;
  if (each.table.reductions == OwnReductions::misfit) return Verdict::either;
  // Which values have gradients where they cross a cut never changes.
  if (std::any_of(each.script.begin(), each.script.end(), [](const PipelineEvent& event) { return event.frozen > 0; }))
    return Verdict::either;
  // The copies of a weight are summed before the first of them is updated. A row that adds to another one later is refused.
  const auto updates_early = [](const std::vector<schedule::Action>& row) {
    const auto update =
        std::find_if(row.begin(), row.end(), [](const auto& action) { return action.kind == schedule::Kind::update; });
    return std::any_of(update, row.end(), [](const auto& action) { return schedule::ends_activation(action.kind); });
  };
  const auto& rows = each.table.table.rows;
  if (!ties_of(each.units).empty() && std::any_of(rows.begin(), rows.end(), updates_early)) return Verdict::either;
  return Verdict::works;
}

namespace {

constexpr const char* act_names[] = {"train", "evaluate", "update without a step"};

}  // namespace

std::string text_of(const PipelineCase& each) {
  EngineCase settings{
      .model = each.model, .ranks = each.ranks(), .factor = each.shard, .options = each.options, .update = each.update};
  std::string text = text_of(settings);
  text = fmt::format("pipeline of {} ranks x {} x {} (replicate x shard)\n{}", each.table.ranks, each.replicate, each.shard,
                     text.substr(text.find('\n') + 1));
  text = text.substr(0, text.find("model: ")) + fmt::format("width {}, {}{}\n", each.model.width,
                                                            each.model.tokens ? "tokens" : "numbers",
                                                            each.model.length > 0 ? " in sequences" : "");
  if (each.receive_ahead != 1) text += fmt::format("receive_ahead = {}\n", each.receive_ahead);
  if (each.resident != 2) text += fmt::format("resident = {}\n", each.resident);
  if (each.units_reversed) text += "stages register their Units in the opposite order\n";
  if (each.classes) text += "the loss is a cross-entropy\n";
  if (each.flags) text += "numbers without a gradient cross the cuts\n";
  if (each.example) text += "with an example\n";
  if (each.update_in_cells) text += "updates in their cells\n";
  if (each.gathers_units)
    text += each.options.reshard ? "Units gather themselves\n" : "stages gather themselves, as is said\n";
  if (!each.stages.empty()) text += fmt::format("stages of {} Units\n", fmt::join(each.stages, ", "));
  for (std::size_t at = 0; at < each.units.size(); ++at) text += fmt::format("unit {}:\n{}", at, text_of(each.units[at], 2));
  text += fmt::format("table: {}{}\n{}", each.table.name,
                      each.table.reductions == OwnReductions::misfit ? ", with reductions anywhere" : "",
                      schedule::table_text(each.table.table));
  for (std::size_t at = 0; at < each.script.size(); ++at) {
    const auto& event = each.script[at];
    text += fmt::format("event {}: {}", at, act_names[static_cast<int>(event.act)]);
    if (event.act == PipelineAct::evaluate) text += fmt::format(", {} microbatches", event.microbatches);
    text += fmt::format(", {} samples{}", event.samples, event.uneven ? " and more" : "");
    if (event.length > 0) text += fmt::format(", sequences of {}{}", event.length, event.lengths ? " and more" : "");
    if (each.classes) text += name_of(event.mask);
    if (event.frozen > 0) text += fmt::format(", pattern {} frozen", event.frozen);
    if (each.classes && event.forgets_weights) text += ", at first without weights";
    text += '\n';
  }
  return text;
}

namespace {

// The table without its last microbatch.
void drop_microbatch(TableCase& table) {
  const int last = --table.table.microbatches;
  table.microbatches = last;
  for (auto& row : table.table.rows)
    std::erase_if(row, [&](const schedule::Action& action) {
      return schedule::has_microbatch(action.kind) && action.microbatch == last;
    });
}

void drop_kind(TableCase& table, schedule::Kind kind) {
  for (auto& row : table.table.rows) std::erase_if(row, [&](const schedule::Action& action) { return action.kind == kind; });
}

}  // namespace

std::vector<PipelineCase> simpler(const PipelineCase& each) {
  std::vector<PipelineCase> list;
  const auto add = [&](bool differs, auto&& change) {
    if (!differs) return;
    PipelineCase copy = each;
    change(copy);
    list.push_back(std::move(copy));
  };
  for (std::size_t at = each.script.size(); at-- > 0;)
    add(each.script.size() > 1, [&](PipelineCase& copy) { copy.script.erase(copy.script.begin() + static_cast<int>(at)); });
  add(each.data_ranks() > 1, [](PipelineCase& copy) {
    copy.replicate = copy.shard = 1;
    copy.options.what = Sharded::none;
  });
  add(each.table.microbatches > 1 && each.table.reductions != OwnReductions::misfit,
      [](PipelineCase& copy) { drop_microbatch(copy.table); });
  add(each.table.own_updates, [](PipelineCase& copy) {
    copy.table.own_updates = false;
    drop_kind(copy.table, schedule::Kind::update);
  });
  add(each.table.reductions != OwnReductions::none, [](PipelineCase& copy) {
    copy.table.reductions = OwnReductions::none;
    drop_kind(copy.table, schedule::Kind::reduce);
  });
  add(each.table.own_sharding, [](PipelineCase& copy) {
    copy.table.own_sharding = false;
    drop_kind(copy.table, schedule::Kind::unshard);
    drop_kind(copy.table, schedule::Kind::reshard);
  });
  add(static_cast<int>(each.units.size()) > each.table.table.stages, [](PipelineCase& copy) {
    copy.units.pop_back();
    copy.stages.clear();
  });
  for (std::size_t at = 0; at < each.units.size(); ++at)
    for (auto& unit : simpler(each.units[at])) add(true, [&](PipelineCase& copy) { copy.units[at] = unit; });
  add(each.model.tokens, [](PipelineCase& copy) { copy.model.tokens = false; });
  add(each.model.width != 4, [](PipelineCase& copy) { copy.model.width = 4; });
  add(each.units_reversed, [](PipelineCase& copy) { copy.units_reversed = false; });
  add(each.classes, [](PipelineCase& copy) { copy.classes = false; });
  add(each.flags, [](PipelineCase& copy) { copy.flags = false; });
  add(each.example, [](PipelineCase& copy) { copy.example = false; });
  add(!each.stages.empty(), [](PipelineCase& copy) { copy.stages.clear(); });
  add(each.receive_ahead != 1, [](PipelineCase& copy) { copy.receive_ahead = 1; });
  add(each.resident != 2, [](PipelineCase& copy) { copy.resident = 2; });
  add(each.options.full_accumulation && each.table.reductions == OwnReductions::none,
      [](PipelineCase& copy) { copy.options.full_accumulation = false; });
  add(each.gathers_units, [](PipelineCase& copy) { copy.gathers_units = false, copy.options.reshard = true; });
  add(each.options.prefetch != 2, [](PipelineCase& copy) { copy.options.prefetch = 2; });
  add(each.options.prefetch_after_reduction, [](PipelineCase& copy) { copy.options.prefetch_after_reduction = false; });
  add(each.options.debug, [](PipelineCase& copy) { copy.options.debug = false; });
  add(each.options.wrap != Wrap::every, [](PipelineCase& copy) { copy.options.wrap = Wrap::every; });
  add(each.options.own_options, [](PipelineCase& copy) { copy.options.own_options = false; });
  add(each.options.recompute > 0, [](PipelineCase& copy) { copy.options.recompute = 0; });
  add(each.options.recompute > 1, [](PipelineCase& copy) { copy.options.recompute = 1; });
  add(each.options.broadcast, [](PipelineCase& copy) { copy.options.broadcast = false; });
  add(each.options.offload != Offload::none, [](PipelineCase& copy) { copy.options.offload = Offload::none; });
  add(each.options.bucket_bytes > 0, [](PipelineCase& copy) { copy.options.bucket_bytes = 0; });
  add(each.update.rule != Rule::sgd, [](PipelineCase& copy) { copy.update.rule = Rule::sgd; });
  add(each.update.momentum > 0, [](PipelineCase& copy) { copy.update.momentum = 0; });
  add(each.update.weight_decay > 0, [](PipelineCase& copy) { copy.update.weight_decay = 0; });
  add(each.update.clip > 0, [](PipelineCase& copy) { copy.update.clip = 0; });
  add(each.update_in_cells, [](PipelineCase& copy) { copy.update_in_cells = false; });
  for (std::size_t at = 0; at < each.script.size(); ++at) {
    const auto& event = each.script[at];
    const auto add_event = [&](bool differs, auto&& change) {
      add(differs, [&](PipelineCase& copy) { change(copy.script[at]); });
    };
    add_event(event.microbatches > 1, [](PipelineEvent& copy) { copy.microbatches = 1; });
    add_event(event.uneven, [](PipelineEvent& copy) { copy.uneven = false; });
    add_event(event.samples != 2, [](PipelineEvent& copy) { copy.samples = 2; });
    add_event(event.frozen > 0, [](PipelineEvent& copy) { copy.frozen = 0; });
    add_event(event.lengths, [](PipelineEvent& copy) { copy.lengths = false; });
    add_event(event.forgets_weights, [](PipelineEvent& copy) { copy.forgets_weights = false; });
    add_event(event.mask != Mask::none, [](PipelineEvent& copy) { copy.mask = Mask::none; });
    add_event(event.length != each.model.length, [&](PipelineEvent& copy) { copy.length = each.model.length; });
  }
  return list;
}

}  // namespace bonfire::cases
