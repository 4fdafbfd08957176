#include "bonfire/train/adapters.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/look.h"
#include "bonfire/base/name_pattern.h"
#include "bonfire/checkpoint/base_weights.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/peft.h"
#include "bonfire/checkpoint/reshard.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/step_events.h"
#include "bonfire/train/resume.h"
#include "bonfire/train/weights.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// One adapter of a model, under all of its names.
struct NamedAdapter {
  plan::AdapterPlace place;
  std::string weight;  // full names
  std::string a, b;
};

std::vector<NamedAdapter> adapters_in(const plan::ModelDescription& model) {
  std::vector<NamedAdapter> all;
  for (const auto& unit : model.units)
    for (const auto& layer : plan::adapted_layers(unit))
      for (const auto& place : plan::adapters_of(unit, layer)) {
        const auto full = [&](const std::string& name) { return unit.name.empty() ? name : unit.name + "." + name; };
        all.push_back({place, full(layer + ".weight"), full(plan::adapter_parameter(layer, place.name, 'a')),
                       full(plan::adapter_parameter(layer, place.name, 'b'))});
      }
  return all;
}

std::string outside(const NamedAdapter& adapter, char which) {
  return fmt::format("{}{}.lora_{}.weight", plan::peft_prefix, adapter.place.public_name, which);
}

// The model that a checkpoint says it is of.
plan::ModelSpec spec_in(const fs::path& checkpoint) {
  const auto manifest = read_manifest(checkpoint);
  const std::string name = (checkpoint / manifest_name).string();
  if (manifest.configuration.empty())
    fail_config("'{}': a program has saved it, and it does not say of which model; allowed: checkpoints of `bonfire train`",
                name);
  const Config config = parse_config(manifest.configuration, name);
  plan::ModelSpec spec = config.model.spec;
  spec.type = plan::model_type(config.model.type);
  return plan::resolve(spec);
}

bool is_peft(const fs::path& folder) { return is_there(folder / peft_config_name); }

// The layers of a file of PEFT's, by their public names.
std::vector<std::string> layers_of(const PeftAdapters& peft, const std::string& name) {
  constexpr std::string_view end = ".lora_A.weight";
  std::vector<std::string> layers;
  for (const auto& tensor : peft.tensors) {
    if (!tensor.name.starts_with(plan::peft_prefix))
      fail_config("'{}': the tensor '{}' is none of plain LoRA; allowed: names that begin with '{}'", name, tensor.name,
                  plan::peft_prefix);
    if (!tensor.name.ends_with(end)) continue;
    layers.push_back(
        tensor.name.substr(plan::peft_prefix.size(), tensor.name.size() - plan::peft_prefix.size() - end.size()));
  }
  return layers;
}

// Each of PEFT's tensors by its name, where they are those of these adapters and no others.
std::map<std::string, at::Tensor> tensors_of(const PeftAdapters& peft, const std::vector<NamedAdapter>& adapters,
                                             const plan::ModelDescription& model, const std::string& name) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& tensor : peft.tensors) tensors.emplace(tensor.name, tensor.values);
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const auto& unit : model.units)
    for (const auto& parameter : unit.parameters)
      if (plan::is_adapter(parameter.name)) shapes.emplace(parameter.slices.front().name, parameter.shape);
  std::vector<std::string> missing, unexpected;
  for (const auto& adapter : adapters)
    for (const char which : {'A', 'B'}) {
      const auto found = tensors.find(outside(adapter, which));
      if (found == tensors.end())
        missing.push_back(outside(adapter, which));
      else if (const auto& shape = shapes.at(found->first); found->second.sizes() != at::IntArrayRef(shape))
        fail_config("'{}': {} is [{}], and [{}] in this model", name, found->first, fmt::join(found->second.sizes(), ", "),
                    fmt::join(shape, ", "));
    }
  for (const auto& [tensor, values] : tensors)
    if (!shapes.contains(tensor)) unexpected.push_back(tensor);
  const auto first = [](const std::vector<std::string>& names) {
    return names.size() == 1 ? names.front() : fmt::format("{} and {} others", names.front(), names.size() - 1);
  };
  if (!missing.empty()) fail_config("'{}': the adapters of this run are not all there; missing: {}", name, first(missing));
  if (!unexpected.empty()) fail_config("'{}': there are adapters that this run does not have: {}", name, first(unexpected));
  return tensors;
}

PeftAdapters peft_for(const Config& config) {
  const auto& spec = config.model.spec.adapter;
  const fs::path folder = config.adapter.weights;
  if (!is_peft(folder))
    fail_key(config, "adapter.weights", fmt::format("there is no {}; allowed: a folder of PEFT's", peft_config_name));
  auto peft = read_peft(folder);
  if (peft.rank != spec.rank)
    fail_key(config, "adapter.weights", fmt::format("is of rank {}; adapter.rank is {}", peft.rank, spec.rank));
  if (peft.alpha != spec.alpha)
    fail_key(config, "adapter.weights", fmt::format("is of alpha {}; adapter.alpha is {}", peft.alpha, spec.alpha));
  return peft;
}

// The public layers as PEFT's target_modules: the last part of their names where that says it all.
std::vector<std::string> target_modules(const plan::ModelSpec& spec, const std::vector<NamedAdapter>& adapters) {
  plan::ModelSpec everything = spec;
  everything.adapter.match = {"*"};
  std::set<std::string> adapted, targets;
  for (const auto& adapter : adapters) adapted.insert(adapter.place.public_name);
  const auto all = adapters_in(plan::describe(everything));
  for (const auto& adapter : adapters) {
    const bool whole = std::all_of(all.begin(), all.end(), [&](const NamedAdapter& other) {
      return other.place.name != adapter.place.name || adapted.contains(other.place.public_name);
    });
    targets.insert(whole ? adapter.place.name : adapter.place.public_name);
  }
  return {targets.begin(), targets.end()};
}

at::Tensor value_of(const fs::path& checkpoint, const Manifest& manifest, const std::string& name) {
  const auto* tensor = manifest.find(name, "value");
  if (!tensor) fail_config("'{}': has no '{}'", (checkpoint / manifest_name).string(), name);
  return read_tensor(checkpoint, manifest, *tensor);
}

plan::ModelSpec adapted_spec(const fs::path& checkpoint) {
  auto spec = spec_in(checkpoint);
  if (spec.adapter.rank == 0)
    fail_config("'{}': its run has no adapters; allowed: a checkpoint of a run with adapter.rank of 1 or more",
                checkpoint.string());
  return spec;
}

// What is added to rows [begin, begin + b.size(0)) of a weight.
struct Change {
  std::int64_t begin = 0;
  at::Tensor a, b;  // in fp64, b with the scale in it
};

void add_changes(const std::vector<Change>& changes, std::int64_t columns, std::int64_t at, const at::Tensor& values) {
  const std::int64_t end = at + values.numel();
  for (const auto& [begin, a, b] : changes) {
    const std::int64_t first = std::max(begin, at / columns);
    const std::int64_t last = std::min(begin + b.size(0), (end + columns - 1) / columns);
    if (first >= last) continue;
    const at::Tensor more = b.narrow(0, first - begin, last - first).mm(a).view(-1);
    const std::int64_t from = std::max(at, first * columns), to = std::min(end, last * columns);
    const at::Tensor own = values.narrow(0, from - at, to - from);
    own.copy_(own.to(at::kDouble).add(more.narrow(0, from - first * columns, to - from)));
  }
}

}  // namespace

void check_adapters(const Config& config) {
  if (!has_adapters(config)) {
    for (const char* key : {"adapter.alpha", "adapter.dropout", "adapter.match", "adapter.weights"})
      if (config.given(key) && !(std::string_view(key) == "adapter.weights" && config.adapter.weights.empty()) &&
          config.given("adapter.rank") == false)
        fail_key(config, key, "there are no adapters; allowed with: adapter.rank of 1 or more");
    return;
  }
  if (config.checkpoint.weights.empty() && config.checkpoint.every > 0)
    fail_key(config, "checkpoint.weights",
             "adapters are trained over weights that are named here, and their checkpoints hold nothing else; allowed: the "
             "folder of a checkpoint or of a run, or checkpoint.every = 0 for a trial over random weights");
  if (!config.checkpoint.weights_of.empty())
    fail_key(config, "checkpoint.weights_of",
             "what adapters change is all of checkpoint.weights; allowed with adapter.rank of 1 or more: []");
  if (config.adapter.weights.empty()) return;
  const auto model = plan::describe(config.model.spec);
  tensors_of(peft_for(config), adapters_in(model), model, config.adapter.weights);
}

void require_same_base(const Config& config, const fs::path& checkpoint) {
  const auto base = base_of(checkpoint);
  if (base.checksum.empty())
    fail_config("'{}': does not say which weights its adapters are over", (checkpoint / manifest_name).string());
  const auto weights = checkpoint_of_weights(config);
  if (const auto words = other_base(base, weights.string(), checksum_of_weights(weights)); !words.empty())
    fail_key(config, "checkpoint.weights", words);
}

void load_adapters(Run& run) {
  const auto& config = run.config;
  if (!has_adapters(config) || config.adapter.weights.empty()) return;
  const auto model = plan::describe(config.model.spec);
  const auto adapters = adapters_in(model);
  const auto tensors = tensors_of(peft_for(config), adapters, model, config.adapter.weights);
  std::map<std::string, at::Tensor> values;
  for (const auto& adapter : adapters) {
    values[adapter.a] = tensors.at(outside(adapter, 'A'));
    values[adapter.b] = tensors.at(outside(adapter, 'B'));
  }
  for (const auto& slice : run.trainee->parameters()->slices()) {
    const auto found = values.find(slice.name);
    if (slice.kind != "value" || found == values.end()) continue;
    slice.write(0, found->second.contiguous().view(-1).narrow(0, slice.begin, slice.length));
  }
  run.trainee->parameters()->slices_written();
  if (run.world.rank() == 0) run.world.log().info("adapters from {}: {} layers", config.adapter.weights, adapters.size());
}

void export_adapters(const fs::path& checkpoint, const fs::path& to) {
  const auto spec = adapted_spec(checkpoint);
  const auto manifest = read_manifest(checkpoint);
  const auto adapters = adapters_in(plan::describe(spec));
  PeftAdapters peft{.rank = spec.adapter.rank,
                    .alpha = spec.adapter.alpha,
                    .dropout = spec.adapter.dropout,
                    .layers = target_modules(spec, adapters),
                    .base = base_of(checkpoint).folder,
                    .transposed = false};
  for (const auto& adapter : adapters) {
    peft.tensors.push_back({outside(adapter, 'A'), value_of(checkpoint, manifest, adapter.a)});
    peft.tensors.push_back({outside(adapter, 'B'), value_of(checkpoint, manifest, adapter.b)});
    peft.transposed = peft.transposed || adapter.place.transposed;
  }
  write_peft(to, peft);
}

fs::path base_for_merge(const fs::path& adapters, const MergeOptions& options) {
  fs::path base = options.base;
  if (base.empty() && is_peft(adapters))
    fail_config("'{}' is a folder of PEFT's, which does not say where our weights are; name them with --base",
                adapters.string());
  if (base.empty()) {
    base = base_of(adapters).folder;
    if (base.empty()) fail_config("'{}': does not say which weights its adapters are over", adapters.string());
    if (!is_there(base / manifest_name))
      fail_config("'{}': the weights below it were in '{}', where there is no checkpoint now; name them with --base",
                  adapters.string(), base.string());
  }
  return base;
}

int merge_adapters(const fs::path& from, const fs::path& to, const MergeOptions& options) {
  const fs::path base = base_for_merge(from, options);
  plan::ModelSpec spec = spec_in(base);
  if (spec.adapter.rank > 0)
    fail_config("'{}': holds adapters itself; allowed: the checkpoint that these were trained over, or a merged one",
                base.string());
  std::map<std::string, at::Tensor> matrices;
  if (is_peft(from)) {
    const auto peft = read_peft(from);
    spec.adapter = {.rank = peft.rank, .alpha = peft.alpha, .match = layers_of(peft, from.string())};
    if (spec.adapter.match.empty()) fail_config("'{}': holds no adapters", from.string());
    const auto model = plan::describe(spec);
    const auto tensors = tensors_of(peft, adapters_in(model), model, from.string());
    for (const auto& adapter : adapters_in(model)) {
      matrices[adapter.a] = tensors.at(outside(adapter, 'A'));
      matrices[adapter.b] = tensors.at(outside(adapter, 'B'));
    }
  } else {
    spec.adapter = adapted_spec(from).adapter;
    if (const auto words = other_base(base_of(from), base.string(), checksum_of_weights(base)); !words.empty())
      fail_config("'{}': {}", from.string(), words);
    const auto manifest = read_manifest(from);
    for (const auto& adapter : adapters_in(plan::describe(spec)))
      for (const auto& name : {adapter.a, adapter.b}) matrices[name] = value_of(from, manifest, name);
  }
  const double scale = spec.adapter.alpha / static_cast<double>(spec.adapter.rank);
  std::map<std::string, std::vector<Change>> changes;
  int weights = 0;
  for (const auto& adapter : adapters_in(plan::describe(spec))) {
    changes[adapter.weight].push_back(
        {adapter.place.begin, matrices.at(adapter.a).to(at::kDouble), matrices.at(adapter.b).to(at::kDouble).mul(scale)});
    ++weights;
  }
  reshard_checkpoint(
      base, to,
      {.progress = options.progress,
       .wanted = [](const ManifestTensor& tensor) { return tensor.kind == "value" || tensor.kind == "buffer"; },
       .change =
           [&](const ManifestTensor& tensor, std::int64_t at, const at::Tensor& values) {
             const auto found = changes.find(tensor.name);
             if (tensor.kind == "value" && found != changes.end()) add_changes(found->second, tensor.shape[1], at, values);
           },
       .states = false});
  return weights;
}

}  // namespace bonfire
