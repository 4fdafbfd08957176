#include "bonfire/base/toml.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <utility>

#include <toml++/toml.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

int line_of(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

TomlValue convert(const toml::node& node, const std::string& name);

TomlTable convert_table(const toml::table& table, const std::string& name) {
  TomlTable entries;
  for (const auto& [key, node] : table) {
    entries.push_back({std::string(key.str()), convert(node, name)});
    // A key's own line: that of a multi-line value's first bracket would do as well, but a table has none.
    entries.back().value.line = static_cast<int>(key.source().begin.line);
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const TomlEntry& a, const TomlEntry& b) { return a.value.line < b.value.line; });
  return entries;
}

TomlValue convert(const toml::node& node, const std::string& name) {
  TomlValue value{.is = false, .line = line_of(node)};
  if (const auto* boolean = node.as_boolean()) {
    value.is = boolean->get();
  } else if (const auto* integer = node.as_integer()) {
    value.is = integer->get();
  } else if (const auto* floating = node.as_floating_point()) {
    value.is = floating->get();
  } else if (const auto* string = node.as_string()) {
    value.is = string->get();
  } else if (const auto* array = node.as_array()) {
    TomlArray items;
    for (const auto& item : *array) items.push_back(convert(item, name));
    value.is = std::move(items);
  } else if (const auto* table = node.as_table()) {
    value.is = convert_table(*table, name);
  } else {
    fail_config("{}:{}: dates and times are not used here; write a string in quotes", name, value.line);
  }
  return value;
}

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\t': out += "\\t"; break;
      case '\r': out += "\\r"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

std::string written(bool value) { return value ? "true" : "false"; }
std::string written(std::int64_t value) { return fmt::format("{}", value); }
std::string written(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}
std::string written(const std::string& value) { return in_quotes(value); }
std::string written(const TomlArray& value) {
  std::string out = "[";
  for (const auto& item : value) out += (out.size() > 1 ? ", " : "") + to_toml(item);
  return out + "]";
}
std::string written(const TomlTable& value) {
  std::string out = "{";
  for (const auto& entry : value) out += (out.size() > 1 ? ", " : "") + entry.key + " = " + to_toml(entry.value);
  return out + "}";
}

// Edits (insert, delete, replace, swap of neighbours) that turn one word into the other.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> cost(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

std::string folded(std::string_view word) {
  std::string out;
  for (const char c : word) out += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

TomlTable parse_toml(std::string_view text, const std::string& name) {
  try {
    return convert_table(toml::parse(text, name), name);
  } catch (const toml::parse_error& error) {
    std::string what(error.description());
    std::replace(what.begin(), what.end(), '\n', ' ');
    fail_config("{}:{}: not TOML: {}", name, error.source().begin.line, what);
  }
}

TomlTable read_toml(const std::filesystem::path& file) {
  if (std::filesystem::is_directory(file)) fail_config("{}: is a folder; a TOML file is needed", file.string());
  std::ifstream in(file, std::ios::binary);
  if (!in) fail_config("{}: cannot be opened; a TOML file that exists is needed", file.string());
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  return parse_toml(text, file.string());
}

std::string to_toml(const TomlValue& value) {
  return std::visit([](const auto& held) { return written(held); }, value.is);
}

std::string kind_of(const TomlValue& value) {
  static constexpr const char* names[] = {"true or false", "an integer", "a number", "a string", "a list", "a table"};
  return names[value.is.index()];
}

std::string nearest(std::string_view typed, std::span<const std::string> words) {
  const std::string want = folded(typed);
  std::string best;
  // About a third of the letters may be wrong; beyond that a suggestion is noise.
  std::size_t least = std::max<std::size_t>(2, want.size() / 3 + 1);
  for (const auto& word : words) {
    const std::size_t edits = edits_between(want, folded(word));
    if (edits < least) {
      least = edits;
      best = word;
    }
  }
  if (!best.empty() || want.size() < 3) return best;
  // "warmup_steps" for "warmup": one word inside the other is a near miss too.
  for (const auto& word : words) {
    const std::string have = folded(word);
    if (have.size() >= 3 && (want.find(have) != std::string::npos || have.find(want) != std::string::npos)) return word;
  }
  return best;
}

}  // namespace bonfire
