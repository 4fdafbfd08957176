#include "bonfire/train/selection.h"

#include <algorithm>
#include <set>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/name_pattern.h"
#include "bonfire/base/toml.h"
#include "bonfire/plan/activation_bytes.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/dtype.h"
#include "bonfire/plan/step_events.h"

namespace bonfire {
namespace {

// Words that stand for many names.
constexpr const char* norms = "norms";
constexpr const char* biases = "biases";
constexpr const char* embeddings = "embeddings";

// Whether `word` is one of them, and stands for this parameter.
bool stands_for(const std::string& word, const plan::UnitDescription& unit, const plan::ParameterDescription& parameter) {
  const std::string& name = parameter.name;
  if (word == norms) return name.find("norm.") != std::string::npos;
  if (word == biases) return name == "bias" || name.ends_with(".bias");
  // Where it is tied, the root holds the embedding.
  return word == embeddings && (unit.kind == plan::UnitKind::embedding || unit.kind == plan::UnitKind::root);
}

// Whether keep_fp32's `pattern` names a parameter, by its name inside the Unit: what stays in fp32 is alike in all blocks.
bool is_kept(const std::string& pattern, const plan::UnitDescription& unit, const plan::ParameterDescription& parameter) {
  return stands_for(pattern, unit, parameter) || names_parameter(pattern, parameter.name);
}

bool is_named(const std::string& pattern, const plan::UnitDescription& unit, const plan::ParameterDescription& parameter) {
  return names_parameter(pattern, full_name(unit, parameter));
}

bool is_ignored(const Config& config, const std::string& full_name) {
  const auto& patterns = config.layout.ignore;
  return std::any_of(patterns.begin(), patterns.end(), [&](const auto& one) { return names_parameter(one, full_name); });
}

bool is_ignored(const Config& config, const plan::UnitDescription& unit, const plan::ParameterDescription& parameter) {
  return is_ignored(config, full_name(unit, parameter));
}

// A name and every beginning of it that ends at a dot.
void add_name(std::set<std::string>& names, const std::string& name) {
  for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) names.insert(name.substr(0, dot));
  names.insert(name);
}

// Every one of a key's patterns names a parameter by its full name, or is one of `words` and stands for one.
void require_names(const Config& config, const std::string& key, const std::vector<std::string>& patterns,
                   const std::set<std::string>& words = {}) {
  const auto model = plan::describe(config.model.spec);
  for (const auto& pattern : patterns) {
    std::set<std::string> names = words;
    bool found = false;
    for (const auto& unit : model.units)
      for (const auto& parameter : unit.parameters) {
        found =
            found || is_named(pattern, unit, parameter) || (words.contains(pattern) && stands_for(pattern, unit, parameter));
        add_name(names, full_name(unit, parameter));
      }
    if (found) continue;
    const std::vector<std::string> all(names.begin(), names.end());
    const std::string meant = nearest(pattern, all);
    std::set<std::string> first;  // a hundred blocks are no help
    for (const auto& name : all)
      if (!words.contains(name)) first.insert(name.substr(0, name.find('.')));
    fail_key(config, key,
             fmt::format("\"{}\" names no parameter of this model{} allowed: {}names that begin with {}", pattern,
                         meant.empty() ? ";" : fmt::format("; did you mean \"{}\"?", meant),
                         words.empty() ? "" : fmt::format("{}, and ", fmt::join(words, " | ")), fmt::join(first, " | ")));
  }
}

void require_groups(const Config& config) {
  for (const auto& group : config.optimizer.group) {
    require_names(config, "optimizer.group", group.match, {norms, biases, embeddings});
    if (group.lr && *group.lr > 0 && config.optimizer.lr == 0)
      fail_key(config, "optimizer.group",
               "a group's lr is scaled with optimizer.lr, which is 0; allowed with it: no lr in a group");
  }
}

// Products take two factors of one type: what is read in another than the rest of its Unit may be in none with it.
bool is_read_alone(const plan::UnitDescription& unit, const plan::ParameterDescription& parameter) {
  return stands_for(norms, unit, parameter) || unit.kind == plan::UnitKind::embedding;
}

void require_read_alone(const Config& config, const plan::UnitDescription& unit,
                        const plan::ParameterDescription& parameter) {
  if (is_read_alone(unit, parameter)) return;
  fail_key(config, "train.keep_fp32",
           unit.kind == plan::UnitKind::root
               ? fmt::format("the head multiplies with the embedding in {} (model.tied = true); allowed with it: norms",
                             config.train.precision)
               : fmt::format("\"{}\" is used in products in {}; allowed: {} | {}, and names of theirs",
                             full_name(unit, parameter), config.train.precision, norms, embeddings));
}

void require_kept_names(const Config& config, const plan::ModelDescription& model) {
  for (const auto& pattern : config.train.keep_fp32) {
    std::set<std::string> names = {norms, embeddings};
    bool found = false;
    for (const auto& unit : model.units)
      for (const auto& parameter : unit.parameters) {
        if (is_kept(pattern, unit, parameter)) {
          found = true;
          require_read_alone(config, unit, parameter);
        }
        if (is_read_alone(unit, parameter)) add_name(names, parameter.name);
      }
    if (found) continue;
    const std::vector<std::string> all(names.begin(), names.end());
    const std::string meant = nearest(pattern, all);
    fail_key(config, "train.keep_fp32",
             fmt::format("\"{}\" names no parameter inside a Unit of this model{} allowed: {}", pattern,
                         meant.empty() ? ";" : fmt::format("; did you mean \"{}\"?", meant), fmt::join(all, " | ")));
  }
}

const char* kind_of(const plan::UnitDescription& unit) {
  static constexpr const char* kinds[] = {"root", "embedding", "block", "head"};
  return kinds[static_cast<std::size_t>(unit.kind)];
}

void require_kinds(const Config& config, const plan::ModelDescription& model) {
  for (const auto& type : config.layout.wrap_types) {
    if (std::any_of(model.units.begin(), model.units.end(), [&](const auto& unit) { return type == kind_of(unit); }))
      continue;
    fail_key(config, "layout.wrap_types",
             fmt::format("model.type = \"{}\" has no {}; allowed with it: block | head", config.model.type, type));
  }
}

// Whether a Unit's parameters stay in a buffer of their own.
bool is_wrapped(const plan::UnitDescription& unit, const Config::Layout& layout) {
  if (layout.wrap == WordOrNumber("all")) return false;
  const auto& types = layout.wrap_types;
  if (!types.empty() && std::find(types.begin(), types.end(), kind_of(unit)) == types.end()) return false;
  const auto* least = std::get_if<std::int64_t>(&layout.wrap);
  return !least || unit.parameter_elements() >= *least;
}

}  // namespace

bool names_parameter(std::string_view pattern, std::string_view name) { return begins_with_parts(pattern, name); }

plan::Kept kept_of(const Config& config) {
  const auto& word = config.train.keep_for_backward;
  return word == "all" ? plan::Kept::all : word == "activations" ? plan::Kept::activations : plan::Kept::least;
}

plan::Recompute recompute_of(const Config& config) {
  const auto& word = config.layout.recompute;
  return word == "full" ? plan::Recompute::full : word == "selective" ? plan::Recompute::selective : plan::Recompute::none;
}

namespace {

// Products in eight bits with one scale for a tensor keep what they have rounded; with one for each row it is of no use to
// the gradient of the weight. They take rows by sixteens.
plan::KeptAs kept_as(const Config& config) {
  const bool eight = config.train.precision == "fp8" && config.train.fp8_scales == "tensor";
  const auto tokens = config.train.microbatch * (config.reads_tokens() ? config.data.sequence : 1);
  return eight && tokens % 16 == 0 ? plan::KeptAs::eight_bits : plan::KeptAs::computed;
}

}  // namespace

plan::TensorPart tensor_part_of(const Config& config, std::optional<int> rank) {
  const int ranks = static_cast<int>(config.layout.tensor);
  return {.rank = rank.value_or(ranks - 1),
          .ranks = ranks,
          .sequence = ranks > 1 && config.layout.sequence_parallel,
          .chunks = static_cast<int>(config.layout.tensor_chunks)};
}

std::function<plan::Placement(const std::string& name)> placements_of(const Config& config, int tensor_rank) {
  const auto part = tensor_part_of(config, tensor_rank);
  if (part.ranks == 1) return {};
  const auto model = plan::describe(config.model.spec, part);
  std::map<std::string, plan::Placement> placements;
  for (const auto& unit : model.units)
    for (const auto& parameter : unit.parameters) {
      if (parameter.boxes.empty()) continue;
      const auto placement = plan::placement_in(model, parameter);
      placements.insert({parameter.name, placement});
      placements.insert({full_name(unit, parameter), placement});
    }
  return [placements = std::move(placements)](const std::string& name) {
    const auto found = placements.find(name);
    return found == placements.end() ? plan::Placement{} : found->second;
  };
}

plan::ModelDescription model_of(const Config& config, std::optional<int> tensor_rank) {
  auto model = plan::describe(config.model.spec, tensor_part_of(config, tensor_rank));
  const auto& frozen = config.train.freeze;
  for (auto& unit : model.units)
    for (auto& parameter : unit.parameters)
      if (is_ignored(config, unit, parameter) ||
          std::any_of(frozen.begin(), frozen.end(), [&](const auto& one) { return is_named(one, unit, parameter); }))
        parameter.trained = false;
  plan::keep_for_backward(model, kept_of(config), kept_as(config));
  plan::recompute(model, recompute_of(config), config.layout.recompute_every);
  return model;
}

plan::ModelDescription wrapped_model_of(const Config& config, std::optional<int> tensor_rank) {
  auto model = model_of(config, tensor_rank);
  for (auto& unit : model.units) {
    std::erase_if(unit.parameters, [&](const plan::ParameterDescription& parameter) {
      const bool ignored = is_ignored(config, unit, parameter);
      if (ignored) model.constant_bytes += parameter.elements() * plan::bytes_of(plan::Dtype::fp32);
      return ignored;
    });
    std::erase_if(unit.shared, [&](const std::string& name) { return is_ignored(config, name); });
  }
  if (config.layout.wrap == WordOrNumber("unit") && config.layout.wrap_types.empty()) return model;
  if (model.units.front().kind != plan::UnitKind::root)
    model.units.insert(model.units.begin(), {.name = "", .kind = plan::UnitKind::root});
  auto& root = model.units.front();
  for (auto& unit : model.units) {
    if (unit.kind == plan::UnitKind::root || is_wrapped(unit, config.layout)) continue;
    for (auto& parameter : unit.parameters) {
      parameter.name = full_name(unit, parameter);
      unit.shared.push_back(parameter.name);
      root.parameters.push_back(std::move(parameter));
    }
    unit.parameters.clear();
  }
  return model;
}

std::function<bool(const std::string& name)> kept_in_fp32(const Config& config) {
  if (config.train.keep_fp32.empty()) return {};
  std::set<std::string> kept;
  for (const auto& unit : plan::describe(config.model.spec).units)
    for (const auto& parameter : unit.parameters)
      for (const auto& pattern : config.train.keep_fp32)
        if (is_kept(pattern, unit, parameter)) kept.insert({parameter.name, full_name(unit, parameter)});
  return [kept = std::move(kept)](const std::string& name) { return kept.contains(name); };
}

std::function<std::int64_t(const std::string& name, const std::vector<std::int64_t>& shape)> scales_of_weights(
    const Config& config) {
  if (config.train.precision != "fp8" || config.layout.offload != "none" || config.model.type == "vgg") return {};
  std::set<std::string> weights;
  for (const auto& unit : plan::describe(config.model.spec).units)
    for (const auto& parameter : unit.parameters)
      if (unit.kind == plan::UnitKind::block && parameter.shape.size() == 2 && !plan::is_adapter(parameter.name))
        weights.insert({parameter.name, full_name(unit, parameter)});
  const bool rows = config.train.fp8_scales == "row";
  return [weights = std::move(weights), rows](const std::string& name, const std::vector<std::int64_t>& shape) {
    const bool fits = weights.contains(name) && shape[0] % 16 == 0 && shape[1] % 16 == 0;
    return fits ? (rows ? shape[0] : std::int64_t{1}) : std::int64_t{0};
  };
}

std::vector<std::string> ignored_parameters(const Config& config) {
  std::vector<std::string> names;
  for (const auto& unit : plan::describe(config.model.spec).units)
    for (const auto& parameter : unit.parameters)
      if (is_ignored(config, unit, parameter)) names.push_back(full_name(unit, parameter));
  return names;
}

std::vector<std::set<std::string>> names_of_groups(const Config& config) {
  std::vector<std::set<std::string>> groups;
  for (const auto& group : config.optimizer.group) {
    auto& names = groups.emplace_back();
    for (const auto& unit : plan::describe(config.model.spec).units)
      for (const auto& parameter : unit.parameters)
        for (const auto& pattern : group.match)
          if (is_named(pattern, unit, parameter) || stands_for(pattern, unit, parameter))
            names.insert(full_name(unit, parameter));
  }
  return groups;
}

void check_selections(const Config& config) {
  const auto model = model_of(config);
  require_names(config, "train.freeze", config.train.freeze);
  require_names(config, "layout.ignore", config.layout.ignore);
  require_names(config, "checkpoint.weights_of", config.checkpoint.weights_of);
  require_groups(config);
  if (!config.layout.ignore.empty() && config.train.precision != "fp32")
    fail_key(config, "layout.ignore",
             fmt::format("what is ignored stays in fp32, and does not go with train.precision = \"{}\"; allowed with: fp32",
                         config.train.precision));
  require_kept_names(config, model);
  require_kinds(config, model);
  const bool trains = std::any_of(model.units.begin(), model.units.end(), [](const plan::UnitDescription& unit) {
    return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                       [](const auto& parameter) { return parameter.trained; });
  });
  if (!trains)
    fail_key(config, config.train.freeze.empty() ? "layout.ignore" : "train.freeze",
             "nothing is left to train; allowed: fewer names");
}

}  // namespace bonfire
