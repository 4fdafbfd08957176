#include "bonfire/plan/tensor_part.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "bonfire/base/error.h"
#include "bonfire/base/limits.h"

namespace bonfire::plan {
namespace {

void divide(ParameterDescription& parameter, const TensorPart& part) {
  if (parameter.split == Split::whole) return;
  parameter.whole = parameter.shape;
  const Box all = whole_box(parameter.whole);
  if (parameter.split == Split::columns) {
    Box own = all;
    own.begin[1] = part.begin(parameter.shape[1]);
    own.end[1] = part.end(parameter.shape[1]);
    parameter.shape[1] = own.end[1] - own.begin[1];
    parameter.boxes = {std::move(own)};
    return;
  }
  const auto parts = parameter.parts.empty() ? std::vector<std::int64_t>{parameter.shape[0]} : parameter.parts;
  std::int64_t before = 0;
  parameter.shape[0] = 0;
  for (const std::int64_t rows : parts) {
    Box own = all;
    own.begin[0] = before + part.begin(rows);
    own.end[0] = before + part.end(rows);
    parameter.shape[0] += own.end[0] - own.begin[0];
    before += rows;
    parameter.boxes.push_back(std::move(own));
  }
}

// The parts of a Unit in the order in which forward comes to them, and whether backward does.
class Reach {
 public:
  Reach(const ModelDescription& model, const UnitDescription& unit, bool reached) : reached_(reached) {
    for (const auto& parameter : unit.parameters)
      if (parameter.trained) trained_.push_back(parameter.name);
    // What it reads of the root's: parts of its own that were put there, and the tied weight.
    for (const auto& name : unit.shared)
      for (const auto& parameter : model.units.front().parameters) {
        if (parameter.name != name || !parameter.trained) continue;
        if (name.starts_with(unit.name + "."))
          trained_.push_back(name.substr(unit.name.size() + 1));
        else
          trained_.push_back(unit.kind == UnitKind::head ? "output.weight" : name);
      }
  }

  // Whether something before these parameters, or in them, has a gradient. Asked in the order of forward.
  bool to(std::string_view prefix) { return reached_ = reached_ || trains(prefix); }
  bool trains(std::string_view prefix) const {
    return std::any_of(trained_.begin(), trained_.end(), [&](const auto& name) { return name.starts_with(prefix); });
  }

 private:
  std::vector<std::string> trained_;  // by their names in the Unit
  bool reached_;
};

class Exchanges {
 public:
  Exchanges(const ModelDescription& model, std::size_t unit, const Exchange& exchange)
      : model_(model),
        number_(unit),
        unit_(model.units[unit]),
        part_(model.tensor),
        heads_(heads_of(model.spec, model.tensor)),
        exchange_(exchange),
        width_(exchange.tokens * model.spec.dim * exchange.element_bytes) {}

  std::vector<Collective> forward() && {
    if (exchange_.tokens == 0) return {};
    switch (unit_.kind) {
      case UnitKind::root: break;
      case UnitKind::embedding: leave(); break;
      case UnitKind::block:
        enter_in_chunks();
        share_heads(CollectiveKind::all_gather);
        attend();
        leave_in_chunks();
        enter_in_chunks();
        leave_in_chunks();
        break;
      case UnitKind::head:
        enter();
        if (part_.ranks > 1)
          for (std::int64_t chunk = 0; chunk < chunks(); ++chunk)
            add(CollectiveKind::all_gather, 3 * 8 * part_.ranks * rows_of(chunk));
        // How many targets all have.
        if (exchange_.context.ranks > 1) add(CollectiveKind::all_reduce, 8, Axis::context);
        break;
    }
    return std::move(list_);
  }

  std::vector<Collective> backward(bool reached) && {
    if (exchange_.tokens == 0) return {};
    Reach reach(model_, unit_, reached);
    // Whatever runs again speaks again.
    if (unit_.recompute == Recompute::full) list_ = Exchanges(model_, number_, exchange_).forward();
    switch (unit_.kind) {
      case UnitKind::root: break;
      case UnitKind::embedding:
        if (reach.trains("tokens") || reach.trains("positions")) enter();
        break;
      case UnitKind::block: block(reach); break;
      case UnitKind::head: {
        const bool normed = reach.to("norm.");
        // In chunks the gradient of the weight is made in forward.
        into_product(reach.trains("output.") && chunks() == 1, normed);
        norm(reach, "norm.");
        break;
      }
    }
    return std::move(list_);
  }

 private:
  // Between the parts that are divided along the sequence, or that every rank has whole, and the split products.
  void enter() {
    if (part_.sequence) add(CollectiveKind::all_gather, width_);
  }
  void leave() {
    if (part_.ranks > 1) add(part_.sequence ? CollectiveKind::reduce_scatter : CollectiveKind::all_reduce, width_);
  }
  // The same beside a product that is cut with it: by samples, or, where there are fewer than chunks, by each rank's
  // positions; by tokens where these are not divided.
  void enter_in_chunks() {
    if (part_.sequence) in_chunks(CollectiveKind::all_gather);
  }
  void leave_in_chunks() {
    if (part_.ranks > 1) in_chunks(part_.sequence ? CollectiveKind::reduce_scatter : CollectiveKind::all_reduce);
  }
  void in_chunks(CollectiveKind kind) {
    const std::int64_t own = exchange_.tokens / exchange_.samples / part_.ranks,
                       pieces = !part_.sequence                     ? exchange_.tokens
                                : exchange_.samples >= part_.chunks ? exchange_.samples
                                                                    : own,
                       chunks = std::min<std::int64_t>(part_.chunks, pieces);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk)
      add(kind, width_ / pieces * (pieces * (chunk + 1) / chunks - pieces * chunk / chunks));
  }
  // The backward of enter(), and what the gradient of the weight behind it reads.
  void into_product(bool weight, bool input) {
    if (weight) enter();
    if (input) leave();
  }
  void share_heads(CollectiveKind kind) {
    if (heads_.sharing == 1) return;
    add(kind, exchange_.tokens * 2 * heads_.kv_heads * model_.spec.head_dim * exchange_.element_bytes);
  }
  std::int64_t heads_bytes(std::int64_t heads, std::int64_t element_bytes) const {
    return exchange_.tokens * heads * model_.spec.head_dim * element_bytes;
  }
  // Between the ranks that share samples: keys and values go round, or heads are exchanged for positions and back.
  void attend() {
    if (exchange_.context.ranks == 1) return;
    if (exchange_.context.way == ContextWay::heads) return exchange_heads();
    for (int pass = 1; pass < exchange_.context.ranks; ++pass)
      add(CollectiveKind::send, heads_bytes(2 * heads_.kv_heads, exchange_.element_bytes), Axis::context);
  }
  // Their gradients follow, in four bytes at least.
  void attend_backward() {
    attend();
    if (exchange_.context.way == ContextWay::heads) return;
    for (int pass = 1; pass < exchange_.context.ranks; ++pass)
      add(CollectiveKind::send, heads_bytes(2 * heads_.kv_heads, std::max<std::int64_t>(4, exchange_.element_bytes)),
          Axis::context);
  }
  void exchange_heads() {
    for (const std::int64_t heads : {heads_.heads + 2 * heads_.kv_heads, heads_.heads})
      add(CollectiveKind::all_to_all, heads_bytes(heads, exchange_.element_bytes), Axis::context);
  }
  // Whose gradients each rank has of its part of the sequence alone.
  void norm(const Reach& reach, const std::string& prefix) {
    for (const char* name : {"weight", "bias"}) summed(reach, prefix + name);
  }
  void summed(const Reach& reach, const std::string& name) {
    if (part_.sequence && reach.trains(name))
      add(CollectiveKind::all_reduce, model_.spec.dim * std::max<std::int64_t>(4, exchange_.element_bytes));
  }

  void block(Reach& reach) {
    const bool norm_of_attention = reach.to("attention_norm."), qkv = reach.to("attention.qkv."),
               output = reach.to("attention.output."), norm_of_feed = reach.to("feed_norm.");
    const bool up = reach.to("feed.gate_up.") || reach.to("feed.up.");
    const bool again = unit_.recompute == Recompute::selective;
    if (up)
      enter_in_chunks();
    else if (reach.trains("feed.down.weight"))
      enter();
    if (again && (up || reach.trains("feed.down.weight"))) enter_in_chunks();
    summed(reach, "feed.down.bias");
    if (up) {
      into_product(reach.trains("feed.gate_up.weight") || reach.trains("feed.up.weight"), norm_of_feed);
      norm(reach, "feed_norm.");
    }
    if (!output) return;
    if (qkv)
      enter_in_chunks();
    else if (reach.trains("attention.output.weight"))
      enter();
    summed(reach, "attention.output.bias");
    if (!qkv) return;
    attend_backward();
    if (again) {
      enter_in_chunks();
      share_heads(CollectiveKind::all_gather);
    }
    share_heads(CollectiveKind::reduce_scatter);
    into_product(reach.trains("attention.qkv.weight"), norm_of_attention);
    norm(reach, "attention_norm.");
  }

  std::int64_t row_bytes() const { return longest_logits(model_, unit_) * exchange_.element_bytes; }
  std::int64_t chunk() const {
    return exchange_.tokens * row_bytes() > most_logit_bytes ? rows_of_chunk(exchange_.tokens, row_bytes())
                                                             : exchange_.tokens;
  }
  std::int64_t chunks() const { return (exchange_.tokens + chunk() - 1) / chunk(); }
  std::int64_t rows_of(std::int64_t number) const { return std::min(chunk(), exchange_.tokens - number * chunk()); }

  void add(CollectiveKind kind, std::int64_t bytes, Axis axis = Axis::tensor) { list_.push_back({kind, axis, bytes}); }

  const ModelDescription& model_;
  std::size_t number_;
  const UnitDescription& unit_;
  const TensorPart& part_;
  HeadsPart heads_;
  Exchange exchange_;
  std::int64_t width_;  // bytes of what every Unit takes and gives
  std::vector<Collective> list_;
};

}  // namespace

std::int64_t elements_between(const TensorPart& part, std::int64_t elements) {
  return part.sequence ? (elements + part.ranks - 1) / part.ranks : elements;
}

std::int64_t handed_on(const ModelDescription& model, const UnitDescription& unit, std::int64_t tokens) {
  const std::int64_t elements = unit.output_elements * tokens;
  return unit.kind == UnitKind::head ? elements : elements_between(model.tensor, elements);
}

std::int64_t longest_logits(const ModelDescription& model, const UnitDescription& head) {
  const int ranks = model.tensor.ranks;
  return ranks == 1 ? head.output_elements : (model.spec.vocab + ranks - 1) / ranks;
}

void require_splits(const ModelSpec& spec, const TensorPart& part) {
  const int ranks = part.ranks;
  require(ranks >= 1 && part.rank >= 0 && part.rank < ranks, "part {} of {}", part.rank, ranks);
  if (ranks == 1) return;
  if (spec.type != ModelType::llama && spec.type != ModelType::gpt2)
    fail_config("model.type is \"{}\", whose layers are not split over {} ranks; allowed: llama | gpt2", name_of(spec.type),
                ranks);
  if (spec.adapter.rank > 0)
    fail_config("adapter.rank is {}: layers that {} ranks split have no adapters. Allowed with: layout.tensor = 1",
                spec.adapter.rank, ranks);
  if (spec.reversible)
    fail_config("model.reversible is true: {} ranks do not split such blocks. Allowed with: layout.tensor = 1", ranks);
  const auto divides = [ranks](const char* key, std::int64_t value) {
    if (value % ranks != 0) fail_config("model.{} is {}, which {} ranks do not divide", key, value, ranks);
  };
  divides("heads", spec.heads);
  divides("ffn", spec.ffn);
  if (spec.kv_heads % ranks != 0 && ranks % spec.kv_heads != 0)
    fail_config("model.kv_heads is {}: {} ranks neither divide it nor are a multiple of it", spec.kv_heads, ranks);
  if (const std::int64_t sharing = ranks / spec.kv_heads; sharing > 1 && spec.head_dim % sharing != 0)
    fail_config("model.head_dim is {}, which the {} ranks that share a head of keys do not divide", spec.head_dim, sharing);
  if (spec.vocab < ranks) fail_config("model.vocab is {}, fewer rows than {} ranks", spec.vocab, ranks);
}

HeadsPart heads_of(const ModelSpec& spec, const TensorPart& part) {
  const std::int64_t ranks = part.ranks;
  if (ranks == 1) return {.heads = spec.heads, .kv_heads = spec.kv_heads};
  return {.heads = spec.heads / ranks,
          .kv_heads = std::max<std::int64_t>(1, spec.kv_heads / ranks),
          .sharing = static_cast<int>(std::max<std::int64_t>(1, ranks / spec.kv_heads))};
}

Placement placement_in(const ModelDescription& model, const ParameterDescription& parameter) {
  if (parameter.boxes.empty()) return {.copy = model.tensor.rank};
  return {.shape = parameter.whole, .boxes = parameter.boxes};
}

void take_part(ModelDescription& model) {
  for (auto& unit : model.units)
    for (auto& parameter : unit.parameters) divide(parameter, model.tensor);
}

std::vector<Collective> exchanged_in_forward(const ModelDescription& model, std::size_t unit, const Exchange& exchange) {
  return Exchanges(model, unit, exchange).forward();
}

std::vector<Collective> exchanged_in_backward(const ModelDescription& model, std::size_t unit, const Exchange& exchange,
                                              bool reached) {
  return Exchanges(model, unit, exchange).backward(reached);
}

}  // namespace bonfire::plan
