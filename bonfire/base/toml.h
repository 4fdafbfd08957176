#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

struct TomlEntry;
struct TomlValue;
using TomlArray = std::vector<TomlValue>;
using TomlTable = std::vector<TomlEntry>;  // in the order of the file

// A value of a TOML file and the line where it stood.
struct BONFIRE_API TomlValue {
  std::variant<bool, std::int64_t, double, std::string, TomlArray, TomlTable> is;
  int line = 0;
};

struct BONFIRE_API TomlEntry {
  std::string key;
  TomlValue value;
};

// Throw ConfigError ("FILE:LINE: ...") where the text is not TOML, and where it holds dates or times, which no file of
// ours uses. `name` stands for the file in messages.
BONFIRE_API TomlTable parse_toml(std::string_view text, const std::string& name);
BONFIRE_API TomlTable read_toml(const std::filesystem::path& file);

// The value as TOML writes it, on one line. A double keeps every bit and is never written like an integer.
BONFIRE_API std::string to_toml(const TomlValue& value);
// "an integer", "a list", ... for messages.
BONFIRE_API std::string kind_of(const TomlValue& value);

// The one of `words` that a person who typed `typed` most likely meant; empty where none is near.
BONFIRE_API std::string nearest(std::string_view typed, std::span<const std::string> words);

}  // namespace bonfire
