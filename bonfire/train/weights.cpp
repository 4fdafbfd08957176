#include "bonfire/train/weights.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <vector>

#include <fmt/ranges.h>

#include "bonfire/base/look.h"
#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/step_events.h"
#include "bonfire/train/adapters.h"
#include "bonfire/train/resume.h"
#include "bonfire/train/selection.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

bool is_weight(const std::string& kind) { return kind == "value" || kind == "buffer"; }

bool is_taken(const Config& config, const std::string& name) {
  if (plan::is_adapter(name)) return false;
  const auto& patterns = config.checkpoint.weights_of;
  return patterns.empty() ||
         std::any_of(patterns.begin(), patterns.end(), [&](const auto& one) { return names_parameter(one, name); });
}

// The parameters that the engine has, by name.
std::map<std::string, std::vector<std::int64_t>> parameters_of(const Config& config) {
  const auto ignored = ignored_parameters(config);
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const auto& unit : plan::describe(config.model.spec).units)
    for (const auto& parameter : unit.parameters) {
      const auto name = plan::full_name(unit, parameter);
      if (std::find(ignored.begin(), ignored.end(), name) == ignored.end()) shapes.emplace(name, parameter.shape);
    }
  return shapes;
}

std::string listed(const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t most_named = 10;
  if (names.empty()) return "";
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), most_named));
  return fmt::format("; {}: {}{}", what, fmt::join(names.begin(), end, ", "),
                     names.size() > most_named ? fmt::format(" and {} others", names.size() - most_named) : "");
}

}  // namespace

fs::path checkpoint_of_weights(const Config& config) {
  const fs::path folder = config.checkpoint.weights;
  if (is_there(folder / manifest_name)) return folder;
  if (const auto newest = latest_checkpoint(checkpoints_of(folder))) return *newest;
  fail_key(config, "checkpoint.weights", "there is no complete checkpoint; allowed: the folder of a checkpoint or of a run");
}

std::string differences_of_parameters(const Config& config, const Manifest& manifest,
                                      const std::function<bool(const std::string& name)>& wanted) {
  const auto shapes = parameters_of(config);
  std::vector<std::string> missing, different, unexpected;
  for (const auto& [name, shape] : shapes) {
    if (!wanted(name)) continue;
    const auto* tensor = manifest.find(name, "value");
    if (tensor == nullptr)
      missing.push_back(name);
    else if (tensor->shape != shape)
      different.push_back(
          fmt::format("{} is [{}] here and [{}] there", name, fmt::join(shape, ", "), fmt::join(tensor->shape, ", ")));
  }
  for (const auto& tensor : manifest.tensors)
    if (tensor.kind == "value" && wanted(tensor.name) && !shapes.contains(tensor.name)) unexpected.push_back(tensor.name);
  return listed("of other shapes", different) + listed("missing in the checkpoint", missing) +
         listed("unexpected in the checkpoint", unexpected);
}

void check_weights(const Config& config, LookAt look) {
  check_adapters(config);
  if (config.checkpoint.weights.empty()) {
    if (!config.checkpoint.weights_of.empty())
      fail_key(config, "checkpoint.weights_of", "needs checkpoint.weights, from which they are taken");
    return;
  }
  const auto checkpoint = checkpoint_of_weights(config);
  const auto manifest = read_manifest(checkpoint);
  const auto words =
      differences_of_parameters(config, manifest, [&](const std::string& name) { return is_taken(config, name); });
  if (!words.empty()) fail_key(config, "checkpoint.weights", "the checkpoint is not of this model" + words);
  if (look == LookAt::files) check_files(checkpoint, manifest);
}

void load_weights(Run& run) {
  const auto& config = run.config;
  if (config.checkpoint.weights.empty()) return;
  const auto checkpoint = checkpoint_of_weights(config);
  const auto step = load_checkpoint(run.world, checkpoint, {.tensors = {run.trainee->parameters()}},
                                    {.wanted = [&](const std::string& name, const std::string& kind) {
                                      return is_weight(kind) && is_taken(config, name);
                                    }});
  if (run.world.rank() != 0) return;
  std::vector<std::string> others;
  for (const auto& [name, shape] : parameters_of(config))
    if (!is_taken(config, name) && !plan::is_adapter(name)) others.push_back(name);
  run.world.log().info("weights of step {} from {}{}", step, checkpoint.string(),
                       listed("with their initial values", others));
}

}  // namespace bonfire
