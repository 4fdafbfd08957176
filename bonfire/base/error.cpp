#include "bonfire/base/error.h"

namespace bonfire {

void throw_error(std::string message) { throw Error(std::move(message)); }

void throw_config_error(std::string message) { throw ConfigError(std::move(message)); }

}  // namespace bonfire
