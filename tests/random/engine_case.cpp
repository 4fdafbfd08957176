#include "tests/random/engine_case.h"

#include <algorithm>

#include <fmt/format.h>

namespace bonfire::cases {

using plan::Offload;
using plan::Sharded;

namespace {

EngineOptions draw_options(Draw draw, int factor) {
  EngineOptions options;
  options.what = factor == 1 ? draw.pick({Sharded::none, Sharded::none, Sharded::parameters})
                             : draw.pick({Sharded::optimizer, Sharded::optimizer, Sharded::gradients, Sharded::gradients,
                                          Sharded::parameters, Sharded::parameters, Sharded::parameters});
  if (factor > 1 && draw.chance(1)) options.what = Sharded::none;
  options.reshard = draw.chance(70);
  if (draw.chance(20)) options.reshard_ranks = draw.pick({1, 2, 2, 4, 3});
  options.prefetch = draw.chance(50) ? 2 : draw.between(0, 3);
  if (draw.chance(1)) options.prefetch = -1;
  options.prefetch_after_reduction = draw.chance(20);
  options.full_accumulation = draw.chance(30);
  if (draw.chance(20)) options.offload = draw.pick({Offload::optimizer, Offload::parameters});
  if (draw.chance(30))
    options.wrap =
        draw.pick({Wrap::types, Wrap::min_parameters, Wrap::predicate, Wrap::all_in_one, Wrap::tied, Wrap::ignored});
  if (draw.chance(2)) options.wrap = draw.pick({Wrap::unknown_type, Wrap::two_at_once});
  if (draw.chance(50)) {
    options.bucket_bytes = draw.pick({1, 200, 700, 4000});
    options.first_bucket_bytes = draw.pick({1, 100, 300, 2000});
  }
  options.negotiate = draw.chance(10);
  options.broadcast = draw.chance(10);
  // What is ignored is not sent either.
  if (options.wrap == Wrap::ignored) options.broadcast = false;
  options.build_scope = draw.chance(15);
  options.debug = draw.chance(10);
  return options;
}

Update draw_update(Draw draw) {
  Update update;
  update.rule = draw.pick({Rule::sgd, Rule::sgd, Rule::adam, Rule::adamw});
  if (draw.chance(40)) update.momentum = 0.9;
  if (draw.chance(15)) update.dampening = 0.3;
  update.nesterov = update.momentum > 0 && update.dampening == 0 && draw.chance(30);
  if (draw.chance(40)) update.weight_decay = 0.1;
  update.maximize = draw.chance(10);
  update.amsgrad = draw.chance(20);
  if (draw.chance(30)) update.clip = draw.pick({0.01, 0.3, 100.0});
  if (draw.chance(15)) update.clip_value = 0.02;
  update.less_for_vectors = draw.chance(25);
  return update;
}

bool throws(Act act) { return act == Act::throw_forward || act == Act::throw_backward || act == Act::throw_on_one; }

Mask draw_mask(Draw draw) {
  const auto mask = draw.pick({Mask::none, Mask::some, Mask::some, Mask::microbatch, Mask::all});
  return mask == Mask::all && !draw.chance(30) ? Mask::some : mask;
}

Event draw_event(Draw draw, const Model& model, bool first) {
  Event event;
  if (!first && draw.chance(30))
    event.act = draw.pick({Act::evaluate, Act::evaluate, Act::drop, Act::read, Act::write, Act::backward_twice});
  if (draw.chance(12))
    event.act =
        draw.pick({Act::step_alone, Act::accumulate_step, Act::throw_forward, Act::throw_backward, Act::throw_on_one});
  if (draw.chance(40)) event.microbatches = draw.between(2, 3);
  event.retain = draw.chance(15);
  event.two_forwards = draw.chance(15);
  if (draw.chance(20)) event.frozen = draw.between(1, 3);
  event.samples = draw.between(1, 3);
  event.uneven = draw.chance(20);
  event.input_gradient = draw.chance(25);
  event.after = draw.below(3);
  event.mask = draw_mask(draw.fork("mask"));
  event.length = model.length;
  Draw lengths = draw.fork("lengths");
  if (model.length == 0) return event;
  if (lengths.chance(event.act == Act::evaluate ? 60 : 20)) event.length = lengths.between(1, 6);
  event.lengths = lengths.chance(15);
  return event;
}

// Whether ranks run different parts.
bool runs_apart(const Part& root) {
  const auto parts = parts_of(root);
  return std::any_of(parts.begin(), parts.end(), [](const Part* part) {
    return std::any_of(part->calls.begin(), part->calls.end(),
                       [](const Call& call) { return call.when == When::odd_ranks; });
  });
}

// An engine for each of the root's children. What they share would belong to several.
void make_several(Draw draw, EngineCase& each) {
  each.several = true;
  Part& root = each.model.root;
  for (int at = 0; root.children.size() < 2; ++at)
    root.children.insert(root.children.begin(), draw_part(draw.fork(at), {.sharing = false, .depth = 1}));
  each_part(root, [&](Part& part) {
    part.shared = -1;
    for (auto& layer : part.layers) layer.tie = -1, layer.alias = false;
    // They must run the same Units on all ranks.
    if (each.comes_and_goes())
      for (auto& call : part.calls)
        if (call.when == When::odd_ranks) call.when = When::always;
  });
  for (auto& child : root.children) {
    const auto parts = parts_of(child);
    if (std::all_of(parts.begin(), parts.end(), [](const Part* part) { return part->layers.empty(); }))
      child = {.layers = {Layer{}}, .registration = {0}, .calls = {{.item = 0}}};
    if (each.comes_and_goes() && !draw.chance(2)) child.mark = Mark::alpha;
  }
  std::vector<int> order;
  for (int child = 0; child < static_cast<int>(root.children.size()); ++child) order.push_back(child);
  root = {.children = root.children, .registration = order};
  // Tokens go into the last one.
  if (each.model.tokens) std::rotate(order.begin(), order.end() - 1, order.end());
  for (const int child : order) root.calls.push_back({.item = child, .residual = draw.chance(50)});
  if (each.model.tokens) root.calls.front().residual = false;
  each.update.clip = 0;  // by the norm of all
  each.options.build_scope = false;
  if (each.options.wrap == Wrap::types || each.options.wrap == Wrap::tied || each.options.wrap == Wrap::ignored)
    each.options.wrap = Wrap::every;
}

// Drawn after everything else, which means what it did without them.
void draw_later_options(Draw draw, EngineCase& each) {
  if (draw.chance(20)) each.options.versions = draw.pick({2, 2, 3});
  if (draw.chance(1)) each.options.versions = 0;
  // Some seeds are there to be refused; most are not.
  if (each.options.versions > 1 && !draw.chance(10)) each.options.reshard_ranks = 0;
  if (each.options.versions > 1 && !draw.chance(3)) each.model.root.mark = Mark::alpha;
  // A late backward needs Units once more, which some ranks alone may do only with this.
  if (each.options.versions > 1 && runs_apart(each.model.root)) each.options.negotiate = true;
  each.options.own_options = draw.chance(20);
  if (each.options.own_options && !draw.chance(10)) each.options.build_scope = false;
  if (draw.chance(12)) make_several(draw.fork("several"), each);
  if (each.options.versions > 1)
    for (auto& event : each.script)
      if (event.act == Act::train && draw.chance(50)) {
        event.act = Act::late;
        event.microbatches = draw.between(1, each.options.versions);
      }
}

}  // namespace

EngineCase draw_engine_case(std::uint64_t seed) {
  Draw draw(Random(seed).fork("engine"));
  EngineCase each;
  each.seed = seed;
  each.ranks = draw.pick({1, 2, 2, 2, 2, 3, 4, 4});
  if (each.ranks == 4)
    each.factor = draw.pick({1, 2, 4, 4});
  else
    each.factor = draw.chance(75) ? each.ranks : 1;
  each.options = draw_options(draw.fork("options"), each.factor);
  each.model = draw_model(draw.fork("model"));
  Draw work = draw.fork("work");
  each.classes = work.chance(35);
  if (each.model.length == 0 && work.chance(30)) each.model.length = work.between(1, 4);
  if (each.comes_and_goes() && !draw.chance(3)) each.model.root.mark = Mark::alpha;
  // A build scope shards Units before they meet.
  if (shares(each.model.root) || each.options.wrap >= Wrap::predicate) each.options.build_scope = false;
  each.update = draw_update(draw.fork("update"));
  for (int at = 0, events = draw.between(2, 5); at < events; ++at)
    each.script.push_back(draw_event(draw.fork("events").fork(at), each.model, at == 0));
  // Somebody has to throw.
  for (auto& event : each.script)
    if (throws(event.act) && each.model.root.calls.empty()) event.act = Act::train;
  if (std::none_of(each.script.begin(), each.script.end(), [](const Event& event) { return event.act == Act::train; }))
    each.script.back().act = Act::train;
  each.look_often = draw.chance(50);
  draw_later_options(draw.fork("later"), each);
  each.options.recompute = draw.fork("recompute").pick({0, 0, 0, 1, 2, 3});
  // Ranks that run different Units twice learn no common order. A forward without a backward then leaves the others to answer
  // it, who may be waiting for another collective of the user's.
  const bool drops =
      std::any_of(each.script.begin(), each.script.end(), [](const Event& event) { return event.act == Act::drop; });
  if (each.classes && drops && runs_apart(each.model.root)) each.options.recompute = 0;
  return each;
}

std::string name_of(Mask mask) {
  constexpr const char* names[] = {"", ", some targets masked", ", a whole microbatch masked", ", everything masked"};
  return names[static_cast<int>(mask)];
}

bool backward_may_repeat(const EngineCase& each) { return each.factor == 1; }

Verdict verdict_of(const EngineCase& each) {
  const auto& options = each.options;
  const auto& root = each.model.root;
  if (each.factor > 1 && options.what == Sharded::none) return Verdict::refused;
  if (options.prefetch < 0 || options.versions < 1) return Verdict::refused;
  if (options.versions > 1 && options.reshard_ranks > 1) return Verdict::refused;
  if (options.reshard_ranks > 0 && each.factor % options.reshard_ranks != 0) return Verdict::refused;
  if (options.offload == Offload::parameters && each.factor > 1 && options.what != Sharded::parameters)
    return Verdict::refused;
  if (options.wrap == Wrap::unknown_type || options.wrap == Wrap::two_at_once) return Verdict::refused;
  if (options.wrap == Wrap::types && !has_mark(root, Mark::beta)) return Verdict::refused;
  if (each.comes_and_goes()) {
    const auto unmarked = [](const Part& part) { return part.mark == Mark::plain; };
    if (each.several ? std::any_of(root.children.begin(), root.children.end(), unmarked) : unmarked(root))
      return Verdict::refused;
    if (options.build_scope && options.own_options) return Verdict::refused;
  }
  if (is_strange(root)) return Verdict::either;
  // What ranks that have run different Units throw ends the run.
  if (runs_apart(root) &&
      std::any_of(each.script.begin(), each.script.end(), [](const Event& event) { return throws(event.act); }))
    return Verdict::either;
  // Freezing is refused between a forward with gradients and its backward, and nobody tells that none will come.
  const auto any = [&](auto&& is) { return std::any_of(each.script.begin(), each.script.end(), is); };
  const auto leaves_forward = [&](const Event& event) {
    return event.act == Act::drop || (each.several && event.act == Act::throw_forward);
  };
  if (any(leaves_forward) && any([](const Event& event) { return event.frozen > 0; })) return Verdict::either;
  return Verdict::works;
}

namespace {

constexpr const char* wrap_names[] = {
    "every Unit",           "types = {Beta}",          "min_parameters = 40", "predicate",           "all_in_one",
    "first parameter tied", "first parameter ignored", "types = {Gamma}",     "types and all_in_one"};
constexpr const char* act_names[] = {"train",
                                     "evaluate",
                                     "forward that nobody differentiates",
                                     "read weights",
                                     "write weights",
                                     "two backwards, then a step",
                                     "step without a backward",
                                     "accumulate, then a step",
                                     "forward throws, then a step",
                                     "backward throws, then a step",
                                     "backward throws on the last rank",
                                     "forwards, then the backward of each with an update"};
constexpr const char* rule_names[] = {"SGD", "Adam", "AdamW"};
constexpr const char* offload_names[] = {"none", "optimizer", "parameters"};

std::string text_of(const EngineOptions& options) {
  std::string text = fmt::format("sharded: {}", plan::name_of(options.what));
  if (!options.reshard) text += ", reshard_after_forward = false";
  if (options.reshard_ranks > 0) text += fmt::format(", reshard_after_forward = {}", options.reshard_ranks);
  if (options.prefetch != 2) text += fmt::format(", prefetch = {}", options.prefetch);
  if (options.prefetch_after_reduction) text += ", backward_prefetch = after_reduction";
  if (options.full_accumulation) text += ", accumulation = full";
  if (options.offload != Offload::none)
    text += fmt::format(", offload = {}", offload_names[static_cast<int>(options.offload)]);
  if (options.wrap != Wrap::every) text += fmt::format(", wrapping: {}", wrap_names[static_cast<int>(options.wrap)]);
  if (options.bucket_bytes > 0)
    text += fmt::format(", buckets of {} bytes, the first of {}", options.bucket_bytes, options.first_bucket_bytes);
  if (options.negotiate) text += ", negotiate_order";
  if (options.broadcast) text += ", start = broadcast";
  if (options.build_scope) text += ", in a build scope";
  if (options.debug) text += ", debug";
  if (options.versions != 1) text += fmt::format(", versions = {}", options.versions);
  if (options.own_options) text += ", Units with options of their own";
  if (options.recompute > 0) text += fmt::format(", recomputed Units ({})", options.recompute);
  return text;
}

std::string text_of(const Update& update) {
  std::string text = fmt::format("{}, lr = {}", rule_names[static_cast<int>(update.rule)], update.lr);
  if (update.rule == Rule::sgd && update.momentum > 0)
    text += fmt::format(", momentum = {}, dampening = {}", update.momentum, update.dampening);
  if (update.rule == Rule::sgd && update.nesterov) text += ", nesterov";
  if (update.rule != Rule::sgd && update.amsgrad) text += ", amsgrad";
  if (update.weight_decay > 0) text += fmt::format(", weight_decay = {}", update.weight_decay);
  if (update.maximize) text += ", maximize";
  if (update.clip > 0) text += fmt::format(", clip = {}", update.clip);
  if (update.clip_value > 0) text += fmt::format(", clip_value = {}", update.clip_value);
  if (update.less_for_vectors) text += ", a rule for vectors";
  return text;
}

std::string text_of(const EngineCase& each, const Event& event) {
  std::string text = act_names[static_cast<int>(event.act)];
  if (event.microbatches > 1) text += fmt::format(", {} microbatches", event.microbatches);
  text += fmt::format(", {} samples{}", event.samples, event.uneven ? " and more on later ranks, none on rank 1" : "");
  if (event.retain) text += ", two backwards through each graph";
  if (event.two_forwards) text += ", two forwards for each loss";
  if (event.frozen > 0) text += fmt::format(", pattern {} frozen", event.frozen);
  if (event.input_gradient) text += ", the input has a gradient";
  if (each.model.length > 0) text += fmt::format(", sequences of {}{}", event.length, event.lengths ? " and more" : "");
  if (each.classes) text += name_of(event.mask);
  if (throws(event.act)) text += fmt::format(", after call {}", event.after);
  return text;
}

}  // namespace

std::string text_of(const EngineCase& each) {
  std::string text = fmt::format("{} ranks, {} x {} (replicate x shard)\n{}\n{}\n", each.ranks, each.ranks / each.factor,
                                 each.factor, text_of(each.options), text_of(each.update));
  text += "model: " + text_of(each.model);
  if (each.several) text += "each child of the root has an engine of its own\n";
  if (each.classes) text += "the loss is a cross-entropy\n";
  for (std::size_t at = 0; at < each.script.size(); ++at)
    text += fmt::format("event {}: {}\n", at, text_of(each, each.script[at]));
  if (each.look_often) text += "whole parameters are compared after every event\n";
  return text;
}

std::vector<EngineCase> simpler(const EngineCase& each) {
  std::vector<EngineCase> list;
  const auto add = [&](bool differs, auto&& change) {
    if (!differs) return;
    EngineCase copy = each;
    change(copy);
    list.push_back(std::move(copy));
  };
  for (std::size_t at = each.script.size(); at-- > 0;)
    add(each.script.size() > 1, [&](EngineCase& copy) { copy.script.erase(copy.script.begin() + static_cast<int>(at)); });
  add(each.ranks == 4, [](EngineCase& copy) { copy.ranks = 2, copy.factor = std::min(copy.factor, 2); });
  add(each.ranks == 3, [](EngineCase& copy) { copy.ranks = 2, copy.factor = std::min(copy.factor, 2); });
  add(each.ranks > 1, [](EngineCase& copy) { copy.ranks = 1, copy.factor = 1; });
  for (auto& model : simpler(each.model))
    add(!each.several || (model.root.layers.empty() && model.root.children.size() > 1 && model.tokens == each.model.tokens &&
                          model.root.calls.size() == model.root.children.size()),
        [&](EngineCase& copy) { copy.model = model; });
  const auto& options = each.options;
  add(!options.reshard, [](EngineCase& copy) { copy.options.reshard = true; });
  add(options.reshard_ranks > 0, [](EngineCase& copy) { copy.options.reshard_ranks = 0; });
  add(options.prefetch != 2, [](EngineCase& copy) { copy.options.prefetch = 2; });
  add(options.prefetch_after_reduction, [](EngineCase& copy) { copy.options.prefetch_after_reduction = false; });
  add(options.full_accumulation, [](EngineCase& copy) { copy.options.full_accumulation = false; });
  add(options.offload != Offload::none, [](EngineCase& copy) { copy.options.offload = Offload::none; });
  add(options.wrap != Wrap::every, [](EngineCase& copy) { copy.options.wrap = Wrap::every; });
  add(options.bucket_bytes > 0, [](EngineCase& copy) { copy.options.bucket_bytes = 0; });
  add(options.negotiate, [](EngineCase& copy) { copy.options.negotiate = false; });
  add(options.broadcast, [](EngineCase& copy) { copy.options.broadcast = false; });
  add(options.build_scope, [](EngineCase& copy) { copy.options.build_scope = false; });
  add(options.debug, [](EngineCase& copy) { copy.options.debug = false; });
  add(options.own_options, [](EngineCase& copy) { copy.options.own_options = false; });
  add(options.recompute > 0, [](EngineCase& copy) { copy.options.recompute = 0; });
  add(options.recompute > 1, [](EngineCase& copy) { copy.options.recompute = 1; });
  add(options.versions > 1, [](EngineCase& copy) {
    copy.options.versions = 1;
    for (auto& event : copy.script)
      if (event.act == Act::late) event.act = Act::train;
  });
  add(each.several, [](EngineCase& copy) { copy.several = false, copy.model.root.mark = Mark::alpha; });
  add(each.look_often, [](EngineCase& copy) { copy.look_often = false; });
  add(each.classes, [](EngineCase& copy) { copy.classes = false; });
  const auto& update = each.update;
  add(update.rule != Rule::sgd, [](EngineCase& copy) { copy.update.rule = Rule::sgd; });
  add(update.momentum > 0, [](EngineCase& copy) { copy.update.momentum = 0, copy.update.nesterov = false; });
  add(update.weight_decay > 0, [](EngineCase& copy) { copy.update.weight_decay = 0; });
  add(update.maximize, [](EngineCase& copy) { copy.update.maximize = false; });
  add(update.amsgrad, [](EngineCase& copy) { copy.update.amsgrad = false; });
  add(update.clip > 0, [](EngineCase& copy) { copy.update.clip = 0; });
  add(update.clip_value > 0, [](EngineCase& copy) { copy.update.clip_value = 0; });
  add(update.less_for_vectors, [](EngineCase& copy) { copy.update.less_for_vectors = false; });
  for (std::size_t at = 0; at < each.script.size(); ++at) {
    const auto& event = each.script[at];
    const auto add_event = [&](bool differs, auto&& change) {
      add(differs, [&](EngineCase& copy) { change(copy.script[at]); });
    };
    add_event(event.microbatches > 1, [](Event& copy) { copy.microbatches = 1; });
    add_event(event.retain, [](Event& copy) { copy.retain = false; });
    add_event(event.two_forwards, [](Event& copy) { copy.two_forwards = false; });
    add_event(event.frozen > 0, [](Event& copy) { copy.frozen = 0; });
    add_event(event.uneven, [](Event& copy) { copy.uneven = false; });
    add_event(event.samples != 2, [](Event& copy) { copy.samples = 2; });
    add_event(event.input_gradient, [](Event& copy) { copy.input_gradient = false; });
    add_event(event.length != each.model.length, [&](Event& copy) { copy.length = each.model.length; });
    add_event(event.lengths, [](Event& copy) { copy.lengths = false; });
    add_event(each.classes && event.mask != Mask::none, [](Event& copy) { copy.mask = Mask::none; });
    add_event(event.after > 0, [](Event& copy) { copy.after = 0; });
  }
  return list;
}

}  // namespace bonfire::cases
