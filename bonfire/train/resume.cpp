#include "bonfire/train/resume.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "bonfire/base/error.h"
#include "bonfire/base/look.h"
#include "bonfire/base/toml.h"
#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/train/adapters.h"
#include "bonfire/train/config_keys.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/run_folder.h"
#include "bonfire/train/weights.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// Beside the model: what its samples are, in which order they come, and what is remembered of each parameter. All else may
// change from one run to the next.
constexpr std::array same_keys = {
    std::string_view("data.type"),      std::string_view("data.sequence"),        std::string_view("data.seed"),
    std::string_view("data.branching"), std::string_view("data.noise"),           std::string_view("data.held_out"),
    std::string_view("data.documents"), std::string_view("data.end_of_document"), std::string_view("train.seed"),
    std::string_view("train.freeze"),   std::string_view("optimizer.type"),       std::string_view("optimizer.amsgrad")};

bool must_be_the_same(const ConfigKey& key) {
  return key.section() == "model" || (key.section() == "adapter" && key.name != "adapter.weights") ||
         std::find(same_keys.begin(), same_keys.end(), key.name) != same_keys.end();
}

fs::path newest_in(const fs::path& run_folder) {
  const auto newest = latest_checkpoint(checkpoints_of(run_folder));
  if (!newest) fail_config("--resume: '{}' has no complete checkpoint", run_folder.string());
  return *newest;
}

Manifest require_same_run(const Config& config, const fs::path& checkpoint) {
  const auto name = (checkpoint / manifest_name).string();
  auto manifest = read_manifest(checkpoint);
  if (!manifest.configuration.empty()) require_resumable(config, manifest.configuration, name);
  const auto words = differences_of_parameters(
      config, manifest, [&](const std::string& parameter) { return !has_adapters(config) || plan::is_adapter(parameter); });
  if (!words.empty()) fail_config("'{}': the checkpoint is not of this model{}", name, words);
  if (has_adapters(config)) require_same_base(config, checkpoint);
  return manifest;
}

void require_checkpoint(const Config& config, const fs::path& checkpoint, LookAt look) {
  const auto manifest = require_same_run(config, checkpoint);
  if (manifest.step >= config.train.steps)
    fail_key(
        config, "train.steps",
        fmt::format("the checkpoint '{}' is of step {}; allowed: more steps than that", checkpoint.string(), manifest.step));
  if (runs_pipedream(config)) require_whole_rounds(config, manifest.step, checkpoint.string());
  if (look == LookAt::files) check_files(checkpoint, manifest);
}

}  // namespace

fs::path checkpoints_of(const fs::path& run_folder) { return run_folder / "checkpoints"; }

Resume find_resume(const Config& config, const std::string& said) {
  fs::path folder = said;
  if (said == "latest") {
    const auto latest = latest_run_folder(config);
    if (!latest)
      fail_config("--resume latest: there is no run '{}' in '{}'; allowed: a run's folder, or that of a checkpoint",
                  config.run.name, config.run.folder);
    folder = *latest;
  }
  if (!is_folder(folder))
    fail_config("--resume {}: is no folder; allowed: latest, a run's folder, or that of a checkpoint", said);
  if (is_there(folder / manifest_name)) return {.checkpoint = folder};
  return {.run_folder = folder, .checkpoint = newest_in(folder)};
}

void require_resumable(const Config& config, const std::string& saved, const std::string& name) {
  const Config before = parse_config(saved, name);
  const auto require_same = [&](const ConfigKey& key) {
    const auto now = to_toml(value_of(key, config)), then = to_toml(value_of(key, before));
    if (now != then)
      fail_key(config, key.name,
               fmt::format("the run that is resumed has {} ({}); it cannot change on the way", then, name));
  };
  // Others follow from those that were given.
  for (const bool given : {true, false})
    for (const auto& key : config_keys())
      if (must_be_the_same(key) && config.given(key.name) == given) require_same(key);
}

void require_resumable(const Config& config, const Resume& resume, LookAt look) {
  if (resume.run_folder.empty()) return require_checkpoint(config, resume.checkpoint, look);
  std::string problems;
  for (const auto& checkpoint : complete_checkpoints(checkpoints_of(resume.run_folder))) try {
      return require_checkpoint(config, checkpoint, look);
    } catch (const BrokenCheckpoint& broken) {
      problems += fmt::format("; {}", broken.what());
    }
  fail_config("--resume: none of the checkpoints in '{}' can be loaded{}", resume.run_folder.string(), problems);
}

void require_restartable(const Config& config, const fs::path& run_folder) {
  for (const auto& checkpoint : complete_checkpoints(checkpoints_of(run_folder))) try {
      require_same_run(config, checkpoint);
      return;
    } catch (const BrokenCheckpoint&) {
      // Whoever loads it says so, and takes the next one.
    }
}

}  // namespace bonfire
