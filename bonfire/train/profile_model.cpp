#include "bonfire/train/profile_model.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/world.h"
#include "bonfire/pipeline/unit_costs.h"
#include "bonfire/train/build.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/run_data.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/staged_model.h"

namespace bonfire {

ProfileStamp profile_stamp(const Config& config) {
  const auto model = model_of(config);
  std::string words = fmt::format("{}, {} Units, {} parameters", config.model.type, plan::chain_of(model).size(),
                                  model.parameter_elements());
  if (config.reads_tokens()) words += fmt::format(", sequence {}", config.data.sequence);
  words += fmt::format(", {}, microbatches of {}", config.train.precision, config.train.microbatch);
  const auto device = device_of(config, 0);
  return {.model = words, .batch = config.train.batch, .device = device.is_cpu() ? "cpu" : gpu_info(device.index()).name};
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
  same("device", profile.device, stamp.device);
}

plan::Profile profile_model(const Config& config, int repeats) {
  const World world = World::from_store(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                        {.device = device_of(config, 0), .log = Log::silent()});
  const auto data = open_data(config);
  const auto [chain, example] = units_to_measure(config, world, world.mesh({}), *data.train);
  const auto stamp = profile_stamp(config);
  plan::Profile profile{.model = stamp.model, .batch = stamp.batch, .device = stamp.device};
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
