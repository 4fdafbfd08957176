#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bonfire/base/toml.h"
#include "bonfire/train/config.h"

namespace bonfire {

// Where a key's value lives in a Config.
using ConfigField =
    std::variant<bool& (*)(Config&), std::int64_t& (*)(Config&), double& (*)(Config&), std::string& (*)(Config&),
                 std::vector<std::string>& (*)(Config&), std::vector<std::int64_t>& (*)(Config&),
                 std::array<double, 2>& (*)(Config&), Bytes& (*)(Config&), SwitchOrNumber& (*)(Config&),
                 WordOrNumber& (*)(Config&), WordOrCounts& (*)(Config&), std::vector<OptimizerGroup>& (*)(Config&)>;
#define BONFIRE_FIELD(member) (+[](Config& config) -> decltype(auto) { return (config.member); })

// Limits of a number; for a list, of each of its numbers.
struct Range {
  std::optional<double> at_least = {};
  std::optional<double> more_than = {};
  std::optional<double> at_most = {};
  std::optional<double> less_than = {};
};

struct ConfigKey {
  std::string name;  // "section.key"
  ConfigField field;
  std::string help;
  std::vector<std::string> choices = {};  // of a string, or of each in a list; empty: any
  Range range = {};
  std::string later = {};  // what is missing for the design's other values, said where one of them is asked for
  // The key means something only where another one has one of these values; elsewhere it is refused, and not written.
  std::string where_key = {};
  std::vector<std::string> where_values = {};
  // And only for a model that reads tokens, or only for one that does not.
  std::optional<bool> reads_tokens = {};

  std::string section() const { return name.substr(0, name.find('.')); }
  std::string key() const { return name.substr(name.find('.') + 1); }
};

// A key of the design that this version cannot honour yet, and what it waits for.
struct LaterKey {
  std::string name;
  std::string waits_for;
};

// A section of the file, in a source of its own. Its keys are the one place that knows them: a row is all that a new option
// needs to be read, checked, overridden, written to the run folder and described in docs/configuration.md.
struct ConfigSection {
  std::string name;
  std::string help = {};
  std::vector<ConfigKey> keys = {};  // none: all of it comes later
  std::vector<LaterKey> later = {};
};
ConfigSection run_section();
ConfigSection model_section();
ConfigSection adapter_section();
ConfigSection data_section();
ConfigSection train_section();
ConfigSection optimizer_section();
ConfigSection layout_section();
ConfigSection checkpoint_section();
ConfigSection fault_section();

// Of all sections, in the order of the reference page.
const std::vector<ConfigKey>& config_keys();
const std::vector<LaterKey>& later_keys();
const std::string& help_of_section(const std::string& section);

// Each that has keys.
std::vector<std::string> config_sections();
std::vector<std::string> keys_of_section(const std::string& section);
const ConfigKey* find_key(const std::string& name);

// "an integer, at least 1".
std::string allowed_text(const ConfigKey& key);
TomlValue value_of(const ConfigKey& key, const Config& config);
// Why a key has no meaning beside the others, and where it would have one; nothing where it has.
std::optional<std::string> why_not(const ConfigKey& key, const Config& config);

}  // namespace bonfire
