// TOML, as configuration files are read.
#include <string_view>

#include "bonfire/base/error.h"
#include "bonfire/base/toml.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    bonfire::parse_toml({reinterpret_cast<const char*>(data), size}, "a.toml");
  } catch (const bonfire::ConfigError&) {
  }
  return 0;
}
