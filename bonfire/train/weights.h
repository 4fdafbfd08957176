#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/train/build.h"
#include "bonfire/train/config.h"
#include "bonfire/train/resume.h"

// Runs that begin with the weights of another one: checkpoint.weights.
namespace bonfire {

// In what the parameters of a checkpoint are not those of the configuration's model, of those that `wanted` names: names and
// shapes, or nothing. REQUIRES: the model is resolved.
BONFIRE_API std::string differences_of_parameters(const Config& config, const Manifest& manifest,
                                                  const std::function<bool(const std::string& name)>& wanted);

// The folder of the checkpoint that checkpoint.weights names, or the newest of the run that it names. Throws ConfigError.
BONFIRE_API std::filesystem::path checkpoint_of_weights(const Config& config);

// Throws ConfigError where checkpoint.weights cannot be what the run begins with: before anything starts.
BONFIRE_API void check_weights(const Config& config, LookAt look);
// Loads them, and says which parameters keep their initial values; nothing where none are asked for. Collective.
void load_weights(Run& run);

}  // namespace bonfire
