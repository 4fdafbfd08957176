#include "bonfire/plan/activation_bytes.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "bonfire/base/error.h"
#include "bonfire/base/limits.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/reversible.h"
#include "bonfire/plan/tensor_part.h"

namespace bonfire::plan {
namespace {

bool attends(const ModelSpec& spec) { return spec.type == ModelType::llama || spec.type == ModelType::gpt2; }

// Of a block's parts in the order in which forward comes to them.
struct BlockSizes {
  explicit BlockSizes(const ModelDescription& model)
      : heads(heads_of(model.spec, model.tensor).heads),
        query(heads * model.spec.head_dim),
        key(heads_of(model.spec, model.tensor).kv_heads * model.spec.head_dim),
        between(elements_between(model.tensor, model.spec.dim)),
        ffn(model.tensor.length(model.spec.ffn)),
        wide(model.spec.type == ModelType::llama ? 2 * ffn : ffn),
        norm_statistics(model.spec.type == ModelType::llama ? 1 : 2) {}
  std::int64_t heads, query, key, between, ffn, wide, norm_statistics;  // between: what comes in, goes out, and is normed
};

// What forward has kept of a Unit's by the time it comes to this parameter: where nothing before it is trained, none of
// that.
struct Before {
  std::int64_t elements = 0, statistics = 0;
};
Before kept_before(const ModelDescription& model, const UnitDescription& unit, const std::string& path) {
  const auto& spec = model.spec;
  const std::string name = path.starts_with(unit.name + ".") ? path.substr(unit.name.size() + 1) : path;
  const BlockSizes sizes(model);
  if (unit.kind == UnitKind::head && attends(spec) && !name.starts_with("norm."))
    return {sizes.between, sizes.norm_statistics};
  if (unit.kind != UnitKind::block || spec.type == ModelType::vgg) return {};
  const bool again = unit.recompute == Recompute::selective;
  // What goes into the activation is made again from what comes in. What an adapted product reads is kept for the adapter.
  const std::int64_t source = again ? 0 : sizes.between;
  const bool adapter = is_adapter(name);
  if (spec.type == ModelType::mlp)
    return name.starts_with("feed.down.") ? Before{adapter ? sizes.wide : source, 0} : Before{};
  Before before{sizes.between + (again ? 0 : sizes.query + 2 * sizes.key), sizes.norm_statistics + sizes.heads};
  if (adapter && name.starts_with("attention.qkv.")) return {sizes.between, sizes.norm_statistics};
  if (name.starts_with("attention.output.")) return before;
  before.elements += sizes.query;
  if (adapter && name.starts_with("feed."))
    return {before.elements + sizes.between + (name.starts_with("feed.down.") ? sizes.wide : 0),
            before.statistics + sizes.norm_statistics};
  if (name.starts_with("feed.down.")) return {before.elements + source, before.statistics + sizes.norm_statistics};
  return name.starts_with("feed") ? before : Before{};
}

// What a forward has at once that keeps nothing, with its input.
std::int64_t forward_elements(const ModelDescription& model, const UnitDescription& unit, std::int64_t input) {
  const auto& spec = model.spec;
  if (unit.kind == UnitKind::root || unit.kind == UnitKind::head) return 0;
  if (unit.kind == UnitKind::embedding || spec.type == ModelType::vgg) return input + 2 * unit.output_elements;
  // What goes into the activation and what comes out is as much as backward works with. Beside it are input and result, and
  // the middle of a block that attends; or that has q, k and v, twice, and what attention makes of them.
  const bool attention = attends(spec) && unit.saved_statistics > 0;
  const std::int64_t feed = (attention ? 3 : 2) * handed_on(model, unit) + unit.working_elements;
  const BlockSizes sizes(model);
  return attention ? std::max(feed, 2 * sizes.between + 3 * sizes.query + 4 * sizes.key) : feed;
}

const ParameterDescription* weight_in(const UnitDescription& unit, std::string_view name) {
  for (const auto& parameter : unit.parameters)
    if (parameter.name == name) return &parameter;
  return nullptr;
}

// Whether products with this weight are made in eight bits, where they can be.
bool suits_eight_bits(const ParameterDescription& weight) { return weight.shape[0] % 16 == 0 && weight.shape[1] % 16 == 0; }

// What one Unit, or backward at one Unit, has.
class Walk {
 public:
  Walk(const ModelDescription& model, const std::vector<StepUnit>& units, const DataParallel& layout,
       const ActivationOptions& options)
      : model_(model), units_(units), layout_(layout), options_(options), element_(bytes_of(layout.compute)) {}

  Activations run() {
    std::int64_t kept = 0;
    bool reached = options_.input_differentiates;
    for (std::size_t at = 0; at < model_.units.size(); ++at) {
      const auto& unit = model_.units[at];
      const bool keeps = !units_[at].root && (units_[at].backward || reached);
      const std::int64_t before = kept;
      std::int64_t again = 0;
      if (keeps) {
        const std::int64_t all = saved_by(at, reached), input = input_bytes(at);
        // What comes in is kept once: here, or as the result of the Unit before, unless that is recomputed.
        const bool counted = !reached || keeps_input(model_, at);
        const bool holds = counted || (at > 0 && is_recomputed(model_.units[at - 1]));
        if (is_recomputed(unit)) {
          again = all - (counted ? input : 0);
          const bool moves = options_.memory.inputs_on_host;
          (moves ? all_.on_host : kept) += holds ? input : 0;
        } else {
          kept += all + (holds && !counted ? input : 0);
        }
        if (ends_reversible(model_, at)) kept += output_bytes(at);
        reached = true;
      }
      all_.kept.push_back(kept);
      all_.again.push_back(again);
      const std::int64_t input = at > 0 ? handed_on(model_, model_.units[at - 1]) : 0;
      const std::int64_t running = forward_elements(model_, unit, input) * element_ * options_.memory.tokens;
      all_.in_forward.push_back(!keeps ? running : is_recomputed(unit) ? before + running : 0);
      all_.incoming.push_back(unit.kind == UnitKind::head ? 0 : output_bytes(at));
      all_.in_backward.push_back(in_backward(at));
      all_.in_weights.push_back(in_weights(at));
    }
    return std::move(all_);
  }

 private:
  static bool is_recomputed(const UnitDescription& unit) { return unit.recompute == Recompute::full; }

  std::int64_t output_bytes(std::size_t at) const {
    return handed_on(model_, model_.units[at], options_.memory.tokens) * element_;
  }
  std::int64_t input_bytes(std::size_t at) const { return at > 0 ? output_bytes(at - 1) : 0; }

  // By a forward that is not to run again, what it alone reads of its input among it. `reached`: so is the Unit before.
  std::int64_t saved_by(std::size_t at, bool reached) const {
    const auto& unit = model_.units[at];
    const std::int64_t bytes =
        (unit.activation_bytes(element_) + of_torchs_attention(unit) * element_) * options_.memory.tokens;
    return reached || is_reversible(model_, at) ? bytes : bytes + first_of_all(at);
  }

  // In two bytes the CPU's attention is torch's, and everywhere on a CPU that ours is not for. Its result lies in another
  // order than the product after it reads. On a GPU it is torch's in four bytes, where groups' keys and values are repeated.
  std::int64_t of_torchs_attention(const UnitDescription& unit) const {
    if (!attends(model_.spec) || unit.kind != UnitKind::block || unit.saved_statistics == 0) return 0;
    const BlockSizes sizes(model_);
    // What comes together of parts is in the right order. What comes back from other ranks is another copy, whatever the
    // order it was made in.
    if (exchanges_heads()) return sizes.query + (in_parts() || options_.memory.on_host ? 0 : of_library(unit, sizes));
    return in_parts() ? 0 : of_library(unit, sizes);
  }
  std::int64_t of_library(const UnitDescription& unit, const BlockSizes& sizes) const {
    if (!options_.memory.on_host) return element_ == 4 && sizes.key < sizes.query ? 2 * sizes.query : 0;
    const auto* output = weight_in(unit, "attention.output.weight");
    if (output && !output->trained && adapters_of(unit, "attention.output").empty()) return 0;
    return element_ == 2 || !options_.memory.own_attention ? sizes.query : 0;
  }

  bool exchanges_heads() const { return layout_.context.ranks > 1 && layout_.context.way == ContextWay::heads; }
  // Attention to some keys at a time.
  bool in_parts() const { return layout_.context.documents || (layout_.context.ranks > 1 && !exchanges_heads()); }

  // The most that the backward of attention has where ranks share samples, beside what is kept of all that comes before it
  // and the gradient of what it gave.
  std::int64_t in_shared_attention(const UnitDescription& unit) const {
    if (!attends(model_.spec) || unit.kind != UnitKind::block || layout_.context.ranks == 1) return 0;
    const BlockSizes sizes(model_);
    const std::int64_t wide = std::max<std::int64_t>(4, element_), keys = 2 * sizes.key;
    // The rest of the block has gone, with what its adapters kept.
    std::int64_t rest = sizes.between + sizes.wide;
    for (const auto& layer : adapted_layers(unit))
      if (layer.starts_with("feed."))
        rest += (layer == "feed.down" ? sizes.ffn : sizes.between) +
                model_.spec.adapter.rank * static_cast<std::int64_t>(adapters_of(unit, layer).size());
    const std::int64_t gone = rest * element_;
    // The packed gradient on its way: as it was made, sent, received, and in order.
    if (exchanges_heads()) return 3 * (sizes.query + keys) * element_ + sizes.query * element_ - gone;
    // Keys and values, and sums of their gradients, each with those that arrive; the gradients of the own part and of
    // another.
    const std::int64_t round = 2 * keys * (element_ + wide);
    const std::int64_t made = sizes.query * (wide + element_) + 2 * keys * element_;
    return sizes.query * element_ + round + made - gone;
  }

  // How much more or less the first Unit keeps of which something is trained: nothing that its own first parameters in
  // front of the trained ones would need, but its input, which nobody else does.
  std::int64_t first_of_all(std::size_t at) const {
    const auto& unit = model_.units[at];
    std::int64_t bytes = 0;
    if (const auto* first = first_trained(unit)) {
      const auto before = kept_before(model_, unit, first->name);
      bytes -= (before.elements * element_ + before.statistics * 4) * options_.memory.tokens;
    }
    if (!keeps_input(model_, at)) bytes += input_bytes(at);
    return bytes;
  }

  const ParameterDescription* first_trained(const UnitDescription& unit) const {
    for (const auto& parameter : unit.parameters)
      if (parameter.trained) return &parameter;
    for (const auto& name : unit.shared)
      for (const auto& parameter : model_.units.front().parameters)
        if (parameter.name == name && parameter.trained) return &parameter;
    return nullptr;
  }

  std::int64_t in_backward(std::size_t at) const {
    const auto& unit = model_.units[at];
    if (unit.kind == UnitKind::head && adapters_of(unit, "output").empty() &&
        longest_logits(model_, unit) * element_ * options_.memory.tokens > most_logit_bytes)
      return of_chunks(at);
    const std::int64_t weight = apart(at);
    std::int64_t beside = unit.working_beside_weight, gradient = 0;
    if (unit.weight_apart && options_.memory.on_host) {
      // The description counts what is read once more.
      const auto convolution = convolution_of(model_, unit);
      const auto workspace = convolution_workspace(convolution, layout_.compute, options_.memory);
      beside += workspace.elements - (convolution.input() + convolution.output());
      gradient = weight > 0 ? workspace.gradient_bytes : 0;
    }
    const std::int64_t working = std::max({unit.working_elements * element_ * options_.memory.tokens,
                                           beside * element_ * options_.memory.tokens + weight + gradient,
                                           in_shared_attention(unit) * options_.memory.tokens});
    // The result of a forward that runs again is there until it has ended.
    const std::int64_t result = is_recomputed(unit) ? output_bytes(at) : 0;
    // So is its own input that came back from the host, and that of the Unit before.
    const std::int64_t back = is_recomputed(unit) && options_.memory.inputs_on_host ? 2 * input_bytes(at) : 0;
    return all_.kept[at] + all_.again[at] + all_.incoming[at] + back + std::max(working, result);
  }

  // What a weight's gradient is made in, where that is not the place it goes to.
  std::int64_t apart(std::size_t at) const {
    const auto& unit = model_.units[at];
    const Dtype arrives = layout_.factors().gradients > 1 ? layout_.reduction : layout_.gradient;
    if (units_[at].writes.empty() || (!unit.weight_apart && arrives == layout_.compute)) return 0;
    const bool widened = options_.memory.on_host && !unit.weight_apart && element_ < bytes_of(arrives);
    return widened ? widened_factors(unit) * bytes_of(arrives) : unit.weight_elements * element_;
  }

  // The CPU widens both factors of a wider gradient, some rows at a time (kernels/product.cpp).
  std::int64_t widened_factors(const UnitDescription& unit) const {
    constexpr std::int64_t most_elements = std::int64_t{1} << 18, least_rows = 16;
    std::int64_t row = 0;
    const auto look_at = [&](const ParameterDescription& weight) {
      if (weight.shape.size() == 2 && weight.elements() == unit.weight_elements) row = weight.shape[0] + weight.shape[1];
    };
    for (const auto& parameter : unit.parameters) look_at(parameter);
    for (const auto& name : unit.shared)
      for (const auto& parameter : model_.units.front().parameters)
        if (parameter.name == name) look_at(parameter);
    return row * std::min(options_.memory.tokens, std::max(least_rows, most_elements / (row + 1)));
  }

  std::int64_t in_weights(std::size_t at) const {
    const auto& unit = model_.units[at];
    std::int64_t bytes = apart(at);
    if (unit.weight_apart && bytes > 0 && options_.memory.on_host) {
      const auto workspace = convolution_workspace(convolution_of(model_, unit), layout_.compute, options_.memory);
      bytes += workspace.elements * element_ * options_.memory.tokens + workspace.gradient_bytes;
    }
    return bytes;
  }

  // A head whose logits would be too many makes them in chunks, and both gradients in forward: that of the weight in fp32,
  // that of its input in the place of the normed input, which is there as well until forward has ended. Of a sequence that
  // is divided these two are whole, and beside the rank's part.
  std::int64_t of_chunks(std::size_t at) const {
    const auto& unit = model_.units[at];
    const std::int64_t input = unit.weight_elements / unit.output_elements;
    const std::int64_t row_bytes = unit.output_elements * element_;
    const std::int64_t whole = model_.tensor.sequence ? 2 * input : input;
    return all_.kept[at] - row_bytes * options_.memory.tokens + whole * element_ * options_.memory.tokens +
           (trains_output(unit) ? unit.weight_elements * bytes_of(Dtype::fp32) : 0) +
           rows_of_chunk(options_.memory.tokens, longest_logits(model_, unit) * element_) * row_bytes;
  }

  bool trains_output(const UnitDescription& head) const {
    if (const auto* weight = weight_in(head, "output.weight")) return weight->trained;
    const auto& root = model_.units.front().parameters;
    return std::any_of(root.begin(), root.end(), [](const auto& parameter) { return parameter.trained; });
  }

  const ModelDescription& model_;
  const std::vector<StepUnit>& units_;
  const DataParallel& layout_;
  const ActivationOptions& options_;
  std::int64_t element_;
  Activations all_;
};

}  // namespace

Convolution convolution_of(const ModelDescription& model, const UnitDescription& unit) {
  Convolution of;
  const auto look_at = [&](const ParameterDescription& parameter) {
    if (parameter.shape.size() != 4) return;
    of.output_channels = parameter.shape[0];
    of.input_channels = parameter.shape[1];
    of.pixels = std::llround(unit.product_flops / 2) / parameter.elements();
  };
  for (const auto& parameter : unit.parameters) look_at(parameter);
  for (const auto& name : unit.shared)
    for (const auto& parameter : model.units.front().parameters)
      if (parameter.name == name) look_at(parameter);
  return of;
}

// Where it is the result of a rectifier, that keeps it: behind convolutions that no pooling follows, and in a classifier.
bool keeps_input(const ModelDescription& model, std::size_t unit) {
  if (model.spec.type != ModelType::vgg || unit == 0) return true;
  const auto& before = model.units[unit - 1];
  const bool pooled = before.saved_statistics > 0;
  return before.weight_apart && (pooled || !model.units[unit].weight_apart);
}

void keep_for_backward(ModelDescription& model, Kept kept) { keep_for_backward(model, kept, KeptAs::computed); }

void keep_for_backward(ModelDescription& model, Kept kept, KeptAs as) {
  const auto& spec = model.spec;
  if (spec.type == ModelType::vgg) return;
  const BlockSizes sizes(model);
  for (auto& unit : model.units) {
    if (unit.kind != UnitKind::block) continue;
    // Products in eight bits have rounded a norm, and keep that, whatever is asked for: half of what two bytes need.
    for (const char* name : {"attention.qkv.weight", "feed.gate_up.weight", "feed.up.weight"}) {
      const auto* weight = weight_in(unit, name);
      if (!weight || !weight->trained || spec.type == ModelType::mlp) continue;
      if (as == KeptAs::eight_bits && suits_eight_bits(*weight))
        unit.saved_elements += spec.dim / 2;
      else if (kept == Kept::all)
        unit.saved_elements += sizes.between;
    }
    if (const auto* weight = weight_in(unit, "feed.down.weight"); weight && weight->trained && kept != Kept::least) {
      if (as == KeptAs::eight_bits && suits_eight_bits(*weight))
        unit.saved_elements += sizes.ffn / 2;
      else
        unit.saved_elements += sizes.ffn;
      // The activation's own gradient has gone when its weight's is made.
      unit.working_beside_weight -= sizes.ffn;
    }
  }
}

namespace {

// What goes into the activation and q, k and v are there while backward is at them, and not before.
void make_parts_again(const ModelDescription& model, UnitDescription& unit) {
  const BlockSizes sizes(model);
  unit.saved_elements -= sizes.wide;
  unit.working_elements += sizes.wide;
  unit.working_beside_weight += sizes.wide;
  if (!attends(model.spec)) return;
  const std::int64_t read = sizes.query + 2 * sizes.key;
  unit.saved_elements -= read;
  unit.working_elements = std::max(unit.working_elements, 2 * read - sizes.between + sizes.query);
}

}  // namespace

bool recomputes_in_part(ModelType type) { return type != ModelType::vgg; }

void recompute(ModelDescription& model, Recompute what, std::int64_t every) {
  if (what == Recompute::selective && !recomputes_in_part(model.spec.type))
    fail_config(
        "recompute = \"selective\" for model.type = \"{}\", whose blocks have no activation between two products; "
        "allowed: none | full",
        name_of(model.spec.type));
  std::int64_t number = 0;
  for (auto& unit : model.units) {
    if (unit.kind != UnitKind::block || number++ % every != 0) continue;
    unit.recompute = what;
    if (what == Recompute::selective) make_parts_again(model, unit);
  }
}

Activations activations_of(const ModelDescription& model, const std::vector<StepUnit>& units, const DataParallel& layout,
                           const ActivationOptions& options) {
  return Walk(model, units, layout, options).run();
}

}  // namespace bonfire::plan
