#include "bonfire/plan/activation_bytes.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "bonfire/base/limits.h"

namespace bonfire::plan {
namespace {

bool attends(const ModelSpec& spec) { return spec.type == ModelType::llama || spec.type == ModelType::gpt2; }

// Of a block's parts in the order in which forward comes to them.
struct BlockSizes {
  explicit BlockSizes(const ModelSpec& spec)
      : query(spec.heads * spec.head_dim),
        key(spec.kv_heads * spec.head_dim),
        wide(spec.type == ModelType::llama ? 2 * spec.ffn : spec.ffn),
        norm_statistics(spec.type == ModelType::llama ? 1 : 2) {}
  std::int64_t query, key, wide, norm_statistics;
};

// What forward has kept of a Unit's by the time it comes to this parameter: where nothing before it is trained, none of
// that.
struct Before {
  std::int64_t elements = 0, statistics = 0;
};
Before kept_before(const ModelSpec& spec, const UnitDescription& unit, const std::string& path) {
  const std::string name = path.starts_with(unit.name + ".") ? path.substr(unit.name.size() + 1) : path;
  const BlockSizes sizes(spec);
  if (unit.kind == UnitKind::head && attends(spec) && !name.starts_with("norm.")) return {spec.dim, sizes.norm_statistics};
  if (unit.kind != UnitKind::block || spec.type == ModelType::vgg) return {};
  if (spec.type == ModelType::mlp) return name.starts_with("feed.down.") ? Before{spec.dim, 0} : Before{};
  Before before{spec.dim + sizes.query + 2 * sizes.key, sizes.norm_statistics + spec.heads};
  if (name.starts_with("attention.output.")) return before;
  before.elements += sizes.query;
  if (name.starts_with("feed.down.")) return {before.elements + spec.dim, before.statistics + sizes.norm_statistics};
  return name.starts_with("feed") ? before : Before{};
}

// What a forward has at once that keeps nothing, with its input.
std::int64_t forward_elements(const ModelSpec& spec, const UnitDescription& unit, std::int64_t input) {
  if (unit.kind == UnitKind::root || unit.kind == UnitKind::head) return 0;
  if (unit.kind == UnitKind::embedding || spec.type == ModelType::vgg) return input + 2 * unit.output_elements;
  // What goes into the activation and what comes out is as much as backward works with. Beside it are input and result, and
  // the middle of a block that attends; or that has q, k and v, twice, and what attention makes of them.
  const bool attention = attends(spec) && unit.saved_statistics > 0;
  const std::int64_t feed = (attention ? 3 : 2) * unit.output_elements + unit.working_elements;
  const BlockSizes sizes(spec);
  return attention ? std::max(feed, 2 * spec.dim + 3 * sizes.query + 4 * sizes.key) : feed;
}

const ParameterDescription* weight_in(const UnitDescription& unit, std::string_view name) {
  for (const auto& parameter : unit.parameters)
    if (parameter.name == name) return &parameter;
  return nullptr;
}

// Whether products with this weight are made in eight bits, where they can be.
bool suits_eight_bits(const ParameterDescription& weight) { return weight.shape[0] % 16 == 0 && weight.shape[1] % 16 == 0; }

// What the CPU's kernels have of their own in the backward of a convolution, in elements of a sample. oneDNN works in blocks
// of eight channels and copies what it reads into that order, but for an input of a few channels. Single small samples, and
// all in two bytes, are multiplied as columns of their nine neighbours; there, the sum of a bias is made of an fp32 copy.
std::int64_t convolution_workspace(const Convolution& of, Dtype compute, std::int64_t samples) {
  constexpr std::int64_t block = 8, few = 4, small = 20480;
  if (compute != Dtype::fp32) return std::max(9 * of.input(), 2 * of.output());
  if (samples == 1 && of.input() <= small) return 9 * of.input();
  const auto blocked = [&](std::int64_t channels) { return (channels + block - 1) / block * block * of.pixels; };
  return blocked(of.output_channels) + (of.input_channels < few ? 0 : blocked(of.input_channels));
}

// What one Unit, or backward at one Unit, has.
class Walk {
 public:
  Walk(const ModelDescription& model, const std::vector<CourseUnit>& units, const DataParallel& layout,
       const ActivationOptions& options)
      : model_(model), units_(units), layout_(layout), options_(options), element_(bytes_of(layout.compute)) {}

  Activations run() {
    std::int64_t kept = 0;
    bool reached = options_.input_differentiates;
    for (std::size_t at = 0; at < model_.units.size(); ++at) {
      const auto& unit = model_.units[at];
      const bool keeps = !units_[at].root && (units_[at].backward || reached);
      if (keeps) {
        kept += (unit.activation_bytes(element_) + of_torchs_attention(unit) * element_) * options_.memory.tokens;
        if (!reached) kept += first_of_all(at);
        reached = true;
      }
      all_.kept.push_back(kept);
      const std::int64_t input = at > 0 ? model_.units[at - 1].output_elements : 0;
      all_.in_forward.push_back(keeps ? 0 : forward_elements(model_.spec, unit, input) * element_ * options_.memory.tokens);
      all_.incoming.push_back(unit.kind == UnitKind::head ? 0 : unit.output_elements * element_ * options_.memory.tokens);
      all_.in_backward.push_back(in_backward(at));
      all_.in_weights.push_back(in_weights(at));
    }
    return std::move(all_);
  }

 private:
  // In two bytes the CPU's attention is torch's, and everywhere on a CPU that ours is not for. Its result lies in another
  // order than the product after it reads. On a GPU it is torch's in four bytes, where groups' keys and values are repeated.
  std::int64_t of_torchs_attention(const UnitDescription& unit) const {
    if (!attends(model_.spec) || unit.kind != UnitKind::block || unit.saved_statistics == 0) return 0;
    const BlockSizes sizes(model_.spec);
    if (!options_.memory.on_host) return element_ == 4 && sizes.key < sizes.query ? 2 * sizes.query : 0;
    return element_ == 2 || !options_.memory.own_attention ? sizes.query : 0;
  }

  // How much more or less the first Unit keeps of which something is trained: nothing that its own first parameters in
  // front of the trained ones would need, but its input, which nobody else does.
  std::int64_t first_of_all(std::size_t at) const {
    const auto& unit = model_.units[at];
    std::int64_t bytes = 0;
    if (const auto* first = first_trained(unit)) {
      const auto before = kept_before(model_.spec, unit, first->name);
      bytes -= (before.elements * element_ + before.statistics * 4) * options_.memory.tokens;
    }
    if (!keeps_input(model_, at)) bytes += model_.units[at - 1].output_elements * element_ * options_.memory.tokens;
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
    if (unit.kind == UnitKind::head && unit.output_elements * element_ * options_.memory.tokens > most_logit_bytes)
      return of_chunks(at);
    const std::int64_t weight = apart(at);
    std::int64_t beside = unit.working_beside_weight;
    if (unit.weight_apart && options_.memory.on_host) {
      // The description counts what is read once more.
      const auto convolution = convolution_of(model_, unit);
      beside += convolution_workspace(convolution, layout_.compute, options_.memory.tokens) -
                (convolution.input() + convolution.output());
    }
    const std::int64_t working = std::max(unit.working_elements * element_ * options_.memory.tokens,
                                          beside * element_ * options_.memory.tokens + weight);
    return all_.kept[at] + all_.incoming[at] + working;
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
    if (unit.weight_apart && bytes > 0 && options_.memory.on_host)
      bytes += convolution_workspace(convolution_of(model_, unit), layout_.compute, options_.memory.tokens) * element_ *
               options_.memory.tokens;
    return bytes;
  }

  // A head whose logits would be too many makes them in chunks, and both gradients in forward: that of the weight in fp32,
  // that of its input in the place of the normed input, which is there as well until forward has ended.
  std::int64_t of_chunks(std::size_t at) const {
    const auto& unit = model_.units[at];
    const std::int64_t input = unit.weight_elements / unit.output_elements;
    const std::int64_t row_bytes = unit.output_elements * element_;
    return all_.kept[at] - row_bytes * options_.memory.tokens + input * element_ * options_.memory.tokens +
           unit.weight_elements * bytes_of(Dtype::fp32) + rows_of_chunk(options_.memory.tokens, row_bytes) * row_bytes;
  }

  const ModelDescription& model_;
  const std::vector<CourseUnit>& units_;
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
  for (auto& unit : model.units) {
    if (unit.kind != UnitKind::block) continue;
    // Products in eight bits have rounded a norm, and keep that, whatever is asked for: half of what two bytes need.
    for (const char* name : {"attention.qkv.weight", "feed.gate_up.weight", "feed.up.weight"}) {
      const auto* weight = weight_in(unit, name);
      if (!weight || !weight->trained || spec.type == ModelType::mlp) continue;
      if (as == KeptAs::eight_bits && suits_eight_bits(*weight))
        unit.saved_elements += spec.dim / 2;
      else if (kept == Kept::all)
        unit.saved_elements += spec.dim;
    }
    if (const auto* weight = weight_in(unit, "feed.down.weight"); weight && weight->trained && kept != Kept::least) {
      if (as == KeptAs::eight_bits && suits_eight_bits(*weight))
        unit.saved_elements += spec.ffn / 2;
      else
        unit.saved_elements += spec.ffn;
      // The activation's own gradient has gone when its weight's is made.
      unit.working_beside_weight -= spec.ffn;
    }
  }
}

Activations activations_of(const ModelDescription& model, const std::vector<CourseUnit>& units, const DataParallel& layout,
                           const ActivationOptions& options) {
  return Walk(model, units, layout, options).run();
}

}  // namespace bonfire::plan
