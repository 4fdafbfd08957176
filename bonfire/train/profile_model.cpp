#include "bonfire/train/profile_model.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/toml.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/world.h"
#include "bonfire/pipeline/unit_costs.h"
#include "bonfire/train/build.h"
#include "bonfire/train/config_keys.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"

namespace bonfire {

namespace {

// FNV-1a: two configurations that differ have different ones, as good as always.
std::uint64_t checksum(const std::string& text) {
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const char letter : text) sum = (sum ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return sum;
}

// The keys that say what a Unit is, and what of it is trained, kept and made again.
std::string keys_of_units(const Config& config) {
  std::string text;
  for (const auto& key : config_keys()) {
    const bool counts = key.section() == "model" || (key.section() == "adapter" && key.name != "adapter.weights") ||
                        key.name.starts_with("layout.recompute") || key.name == "train.freeze" ||
                        key.name == "train.keep_for_backward" || key.name == "train.keep_fp32";
    if (counts) text += fmt::format("{} = {}\n", key.name, to_toml(value_of(key, config)));
  }
  return text;
}

}  // namespace

void keep_units_alone(Config& config) {
  Config::Layout layout;
  layout.recompute = config.layout.recompute;
  layout.recompute_every = config.layout.recompute_every;
  layout.recompute_offload = config.layout.recompute_offload;
  config.layout = std::move(layout);
  std::erase_if(config.origin, [](const auto& entry) {
    return entry.first.starts_with("layout.") && !entry.first.starts_with("layout.recompute");
  });
}

ProfileStamp profile_stamp(const Config& config) {
  const auto model = model_of(config);
  std::string words = fmt::format("{}, {} Units, {} parameters", config.model.type, plan::chain_of(model).size(),
                                  model.parameter_elements());
  if (config.reads_tokens()) words += fmt::format(", sequence {}", config.data.sequence);
  words += fmt::format(", {}, keys {:08x}", config.train.precision, checksum(keys_of_units(config)) & 0xffffffff);
  const auto device = device_of(config, 0);
  return {.model = words,
          .batch = config.train.batch,
          .microbatch = config.train.microbatch,
          .device = device.is_cpu() ? "cpu" : gpu_info(device.index()).name};
}

void require_same_model(const plan::Profile& profile, const std::string& file, const Config& config) {
  const auto stamp = profile_stamp(config);
  const auto same = [&](const char* what, const auto& has, const auto& wanted) {
    if (has != wanted)
      fail_config("profile '{}' is of {} '{}', and {} has '{}'; allowed: a profile of the same", file, what, has,
                  config.file, wanted);
  };
  same("model", profile.model, stamp.model);
  same("batch", profile.batch, stamp.batch);
  same("microbatches", profile.microbatch, stamp.microbatch);
  same("device", profile.device, stamp.device);
}

plan::Profile profile_model(const Config& config, int repeats) {
  const World world = World::from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                        {.device = device_of(config, 0), .log = Log::silent()});
  const auto data = open_data(config);
  const auto [chain, example] = units_to_measure(config, world, world.mesh({}), *data.train);
  const auto stamp = profile_stamp(config);
  plan::Profile profile{.model = stamp.model, .batch = stamp.batch, .microbatch = stamp.microbatch, .device = stamp.device};
  const auto count = config.train.batch / config.train.microbatch;
  const auto times = static_cast<double>(count);
  const auto states = memory_options_of(config).optimizer_states;
  const auto costs = profile_units(chain, example, {.repeats = repeats});
  for (std::size_t unit = 0; unit < costs.size(); ++unit) {
    const auto& cost = costs[unit];
    profile.units.push_back({.name = chain.units[unit],
                             .forward = times * cost.forward,
                             .backward = times * cost.backward,
                             .forward_spread = times * cost.forward_spread,
                             .backward_spread = times * cost.backward_spread,
                             .output_bytes = count * cost.output_bytes,
                             .parameter_bytes = cost.parameter_bytes,
                             .state_bytes = cost.trained_bytes * (1 + states),
                             .saved_bytes = count * cost.saved_bytes});
  }
  return profile;
}

}  // namespace bonfire
