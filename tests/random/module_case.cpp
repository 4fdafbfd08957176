#include "tests/random/module_case.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace bonfire::cases {
namespace {

// Layers with one number are of one shape.
int draw_tie(Draw& draw, Op op) {
  const bool square = op == Op::linear || op == Op::our_linear;
  if (!square && op != Op::table) return -1;
  return draw.chance(25) ? (square ? 0 : 10) + draw.below(2) : -1;
}

Layer draw_layer(Draw draw, const ModelLimits& limits) {
  Layer layer;
  layer.op = draw.pick({Op::linear, Op::linear, Op::linear, Op::our_linear, Op::our_linear, Op::norm, Op::our_norm, Op::gain,
                        Op::scalar, Op::odd_shape, Op::bottleneck, Op::bottleneck, Op::nothing, Op::table});
  layer.bias = draw.chance(60);
  layer.inner = draw.pick({0, 1, 1, 3, 7, 40});
  if (limits.sharing) layer.tie = draw_tie(draw, layer.op);
  layer.alias = layer.tie >= 0 && draw.chance(25);
  layer.frozen = layer.tie < 0 && draw.chance(12);
  layer.frozen_bias = draw.chance(10);
  return layer;
}

When draw_when(Draw& draw, const ModelLimits& limits) {
  if (!limits.conditions || !draw.chance(8)) return When::always;
  return draw.pick({When::odd_steps, When::later_steps, When::twice_later, When::odd_ranks});
}

void draw_calls(Draw draw, const ModelLimits& limits, Part& part) {
  for (int item : draw.permutation(part.items())) {
    if (draw.chance(10) && part.items() > 1) continue;  // unused
    part.calls.push_back({.item = item, .residual = draw.chance(60), .when = draw_when(draw, limits)});
  }
  while (part.items() > 0 && draw.chance(20))
    part.calls.insert(part.calls.begin() + draw.below(static_cast<int>(part.calls.size()) + 1),
                      {.item = draw.below(part.items()), .residual = draw.chance(60), .when = draw_when(draw, limits)});
  part.registration = draw.chance(50) ? draw.permutation(part.items()) : std::vector<int>{};
  if (part.registration.empty())
    for (int item = 0; item < part.items(); ++item) part.registration.push_back(item);
}

Part draw_part(Draw draw, const ModelLimits& limits, int depth) {
  Part part;
  part.mark = draw.pick({Mark::alpha, Mark::alpha, Mark::beta, Mark::plain});
  if (draw.chance(12)) {
    part.sequence = draw.pick({Sequence::wrapped, Sequence::unit});
    for (int at = draw.between(1, 3); at > 0; --at) {
      Layer layer = draw_layer(draw.fork(at), limits);
      layer.tie = -1;
      part.layers.push_back(layer);
    }
    for (int item = 0; item < part.items(); ++item) {
      part.calls.push_back({.item = item});
      part.registration.push_back(item);
    }
    return part;
  }
  for (int at = draw.between(depth > 0 && draw.chance(30) ? 0 : 1, 3); at > 0; --at)
    part.layers.push_back(draw_layer(draw.fork(at), limits));
  if (depth > 0)
    for (int at = draw.pick({0, 0, 1, 2}); at > 0; --at)
      part.children.push_back(draw_part(draw.fork(100 + at), limits, depth - 1));
  draw_calls(draw.fork("calls"), limits, part);
  if (draw.chance(15)) part.side = draw.pick({Side::made, Side::made, Side::idle});
  if (limits.strange && draw.chance(2)) part.side = Side::weight;
  if (limits.strange && draw.chance(2)) part.in_place = true;
  return part;
}

// One of the parts appears at a second place.
void draw_shared(Draw draw, Part& root) {
  if (root.children.empty() || !draw.chance(12)) return;
  Part copy = root.children[static_cast<std::size_t>(draw.below(static_cast<int>(root.children.size())))];
  for (auto& child : root.children)
    if (text_of(child, 0) == text_of(copy, 0)) child.shared = 0;
  copy.shared = 0;
  Part* home = &root;
  for (auto& child : root.children)
    if (child.shared < 0 && child.sequence == Sequence::none && draw.chance(50)) home = &child;
  home->children.push_back(copy);
  home->registration.push_back(home->items() - 1);
  home->calls.push_back({.item = home->items() - 1});
}

}  // namespace

Part draw_part(Draw draw, const ModelLimits& limits) { return draw_part(draw, limits, limits.depth); }

Model draw_model(Draw draw, const ModelLimits& limits) {
  Model model;
  model.width = draw.pick({1, 2, 3, 4, 5, 6, 6, 9, 17});
  model.rows = draw.pick({1, 3, 5, 8});
  model.length = draw.chance(25) ? draw.between(1, 3) : 0;
  model.tokens = draw.chance(20);
  Part& root = model.root;
  root.mark = draw.chance(75) ? Mark::alpha : Mark::plain;
  for (int at = draw.pick({0, 0, 1, 2, 3}); at > 0; --at) root.layers.push_back(draw_layer(draw.fork(at), limits));
  for (int at = draw.pick({0, 1, 2, 3, 4}); at > 0; --at)
    root.children.push_back(draw_part(draw.fork(100 + at), limits, limits.depth));
  const auto all = parts_of(root);
  if (std::all_of(all.begin(), all.end(), [](const Part* part) { return part->layers.empty(); }))
    root.layers.push_back({.op = Op::linear});
  draw_calls(draw.fork("calls"), limits, root);
  if (limits.sharing) draw_shared(draw.fork("shared"), root);
  if (model.tokens) {
    const Layer rows{.op = Op::table, .bias = false, .tie = limits.sharing && draw.chance(40) ? 10 : -1};
    Part front{.mark = Mark::beta, .layers = {rows}, .registration = {0}, .calls = {{.item = 0, .residual = false}}};
    root.children.push_back(front);
    root.registration.insert(root.registration.begin() + draw.below(root.items()), root.items() - 1);
    root.calls.insert(root.calls.begin(), {.item = root.items() - 1, .residual = false});
  }
  return model;
}

std::vector<const Part*> parts_of(const Part& part) {
  std::vector<const Part*> list{&part};
  for (const auto& child : part.children)
    for (const auto* inner : parts_of(child)) list.push_back(inner);
  return list;
}

void each_part(Part& part, const std::function<void(Part&)>& visit) {
  visit(part);
  for (auto& child : part.children) each_part(child, visit);
}

bool has_mark(const Part& part, Mark mark) {
  const auto all = parts_of(part);
  return std::any_of(all.begin(), all.end(), [&](const Part* each) { return each->mark == mark; });
}

bool any_unit(const Part& part) {
  const auto all = parts_of(part);
  return std::any_of(all.begin(), all.end(),
                     [](const Part* each) { return each->mark != Mark::plain || each->sequence != Sequence::none; });
}

bool is_strange(const Part& part) {
  const auto all = parts_of(part);
  return std::any_of(all.begin(), all.end(), [](const Part* each) { return each->side == Side::weight || each->in_place; });
}

bool shares(const Part& part) {
  const auto all = parts_of(part);
  return std::any_of(all.begin(), all.end(), [](const Part* each) {
    return each->shared >= 0 ||
           std::any_of(each->layers.begin(), each->layers.end(), [](const Layer& layer) { return layer.tie >= 0; });
  });
}

namespace {

constexpr const char* op_names[] = {"linear", "our_linear", "norm",       "our_norm", "gain",
                                    "scalar", "odd_shape",  "bottleneck", "nothing",  "table"};
constexpr const char* when_names[] = {"", " on odd steps", " from the third step on", " twice from the third step on",
                                      " on odd ranks"};
constexpr const char* mark_names[] = {"module", "Unit Alpha", "Unit Beta"};
constexpr const char* sequence_names[] = {"", ", Sequential with wrapped children", ", UnitSequential"};
constexpr const char* side_names[] = {"", ", side output", ", side output that nobody reads",
                                      ", side output that is a weight"};

template <class T, std::size_t n>
const char* word(const char* const (&names)[n], T value) {
  return names[static_cast<std::size_t>(value)];
}

std::string text_of(const Layer& layer) {
  std::string text = word(op_names, layer.op);
  if (layer.op == Op::bottleneck) text += fmt::format("({})", layer.inner);
  if (!layer.bias) text += " without bias";
  if (layer.tie >= 0) text += fmt::format(" tied{} as {}", layer.alias ? " by memory" : "", layer.tie);
  if (layer.frozen) text += " frozen";
  if (layer.frozen_bias) text += " with frozen bias";
  return text;
}

}  // namespace

std::string text_of(const Part& part, int indent) {
  const std::string space(static_cast<std::size_t>(indent), ' ');
  std::string text = fmt::format("{}{}{}{}{}{}\n", space, word(mark_names, part.mark), word(sequence_names, part.sequence),
                                 word(side_names, part.side), part.in_place ? ", writes to its input" : "",
                                 part.shared >= 0 ? fmt::format(", shared as {}", part.shared) : "");
  std::vector<std::string> calls;
  for (const auto& call : part.calls)
    calls.push_back(fmt::format("{}{}{}", call.residual ? "+" : "", call.item, word(when_names, call.when)));
  text += fmt::format("{}  forward: {}; registered: {}\n", space, fmt::join(calls, ", "), fmt::join(part.registration, " "));
  int item = 0;
  for (const auto& layer : part.layers) text += fmt::format("{}  {}: {}\n", space, item++, text_of(layer));
  for (const auto& child : part.children) text += fmt::format("{}  {}:\n{}", space, item++, text_of(child, indent + 4));
  return text;
}

std::string text_of(const Model& model) {
  return fmt::format("width {}, {}{}\n{}", model.width, model.tokens ? "tokens" : "numbers",
                     model.length > 0 ? fmt::format(" in sequences of {}", model.length) : "", text_of(model.root, 2));
}

namespace {

void remove_item(Part& part, int item) {
  if (item < static_cast<int>(part.layers.size()))
    part.layers.erase(part.layers.begin() + item);
  else
    part.children.erase(part.children.begin() + (item - static_cast<int>(part.layers.size())));
  std::erase(part.registration, item);
  for (auto& each : part.registration) each -= each > item;
  std::erase_if(part.calls, [&](const Call& call) { return call.item == item; });
  for (auto& call : part.calls) call.item -= call.item > item;
}

}  // namespace

std::vector<Part> simpler(const Part& part) {
  std::vector<Part> list;
  if (part.items() == 1 && part.children.size() == 1 && part.shared < 0) list.push_back(part.children.front());
  const auto add = [&](auto&& change) {
    Part copy = part;
    change(copy);
    list.push_back(std::move(copy));
  };
  for (int item = part.items(); item-- > 0;)
    if (part.items() > 1) add([&](Part& copy) { remove_item(copy, item); });
  for (std::size_t at = 0; at < part.calls.size(); ++at) {
    if (part.calls.size() > 1 && part.sequence == Sequence::none)
      add([&](Part& copy) { copy.calls.erase(copy.calls.begin() + static_cast<std::ptrdiff_t>(at)); });
    if (part.calls[at].when != When::always) add([&](Part& copy) { copy.calls[at].when = When::always; });
    if (part.calls[at].residual && part.sequence == Sequence::none)
      add([&](Part& copy) { copy.calls[at].residual = false; });
  }
  for (std::size_t at = 0; at < part.layers.size(); ++at) {
    const auto& layer = part.layers[at];
    const auto add_layer = [&](bool differs, auto&& change) {
      if (differs) add([&](Part& copy) { change(copy.layers[at]); });
    };
    add_layer(layer.tie >= 0, [](Layer& each) { each.tie = -1, each.alias = false; });
    add_layer(layer.alias, [](Layer& each) { each.alias = false; });
    add_layer(layer.frozen, [](Layer& each) { each.frozen = false; });
    add_layer(layer.frozen_bias, [](Layer& each) { each.frozen_bias = false; });
    add_layer(layer.bias, [](Layer& each) { each.bias = false; });
    add_layer(layer.op != Op::linear && layer.tie < 0, [](Layer& each) { each.op = Op::linear; });
  }
  if (!std::is_sorted(part.registration.begin(), part.registration.end()))
    add([](Part& copy) { std::sort(copy.registration.begin(), copy.registration.end()); });
  if (part.side != Side::none) add([](Part& copy) { copy.side = Side::none; });
  if (part.in_place) add([](Part& copy) { copy.in_place = false; });
  if (part.shared >= 0) add([](Part& copy) { copy.shared = -1; });
  if (part.sequence != Sequence::none) add([](Part& copy) { copy.sequence = Sequence::none; });
  if (part.mark == Mark::beta) add([](Part& copy) { copy.mark = Mark::alpha; });
  for (std::size_t at = 0; at < part.children.size(); ++at)
    for (auto& variant : simpler(part.children[at])) {
      if (part.children[at].shared >= 0 && variant.shared >= 0) continue;  // it would not be the same module any more
      add([&](Part& copy) { copy.children[at] = variant; });
    }
  return list;
}

std::vector<Model> simpler(const Model& model) {
  std::vector<Model> list;
  const auto add = [&](auto&& change) {
    Model copy = model;
    change(copy);
    list.push_back(std::move(copy));
  };
  for (auto& root : simpler(model.root)) add([&](Model& copy) { copy.root = root; });
  if (model.tokens) add([](Model& copy) { copy.tokens = false; });
  if (model.length > 0) add([](Model& copy) { copy.length = 0; });
  if (model.width != 4) add([](Model& copy) { copy.width = 4; });
  return list;
}

}  // namespace bonfire::cases
