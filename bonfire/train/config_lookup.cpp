#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/base/size.h"
#include "bonfire/train/config_keys.h"

// Questions about the table of keys.
namespace bonfire {

std::vector<std::string> keys_of_section(const std::string& section) {
  std::vector<std::string> keys;
  for (const auto& key : config_keys()) {
    if (key.section() == section) keys.push_back(key.key());
  }
  return keys;
}

const ConfigKey* find_key(const std::string& name) {
  const auto& keys = config_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

std::string allowed_text(const ConfigKey& key) {
  static constexpr const char* types[] = {"true or false",
                                          "an integer",
                                          "a number",
                                          "a string",
                                          "a list of strings",
                                          "a list of integers",
                                          "a list of two numbers",
                                          "bytes, as a number or a string such as \"2GiB\"",
                                          "true | false | an integer",
                                          "an integer",
                                          "a list of integers",
                                          "tables with `match` (names), `lr` and `weight_decay` (numbers)"};
  const bool or_number = std::holds_alternative<WordOrNumber& (*)(Config&)>(key.field) ||
                         std::holds_alternative<WordOrCounts& (*)(Config&)>(key.field);
  std::string text;
  for (const auto& choice : key.choices) text += (text.empty() ? "" : " | ") + (choice.empty() ? "\"\"" : choice);
  if (std::holds_alternative<std::vector<std::string>& (*)(Config&)>(key.field) && !text.empty()) return "a list of " + text;
  if (!text.empty() && !or_number) return text;
  text += (text.empty() ? "" : " | ") + std::string(types[key.field.index()]);
  const auto limit = [&](const char* words, const std::optional<double>& value) {
    if (value) text += fmt::format(", {} {}", words, *value);
  };
  const auto& range = key.range;
  if (range.at_least && range.at_most && *range.at_least == *range.at_most) return fmt::format("{}", *range.at_least);
  limit("at least", range.at_least);
  limit("greater than", range.more_than);
  limit("at most", range.at_most);
  limit("less than", range.less_than);
  return text;
}

namespace {

TomlValue as_toml(bool value) { return {.is = value}; }
TomlValue as_toml(std::int64_t value) { return {.is = value}; }
TomlValue as_toml(double value) { return {.is = value}; }
TomlValue as_toml(const std::string& value) { return {.is = value}; }
TomlValue as_toml(const Bytes& value) {
  if (value.count == 0) return {.is = std::int64_t{0}};
  return {.is = exact_bytes(value.count)};
}
template <class List>
TomlValue as_toml(const List& list);
TomlValue as_toml(const OptimizerGroup& group) {
  TomlTable table{{"match", as_toml(group.match)}};
  if (group.lr) table.push_back({"lr", as_toml(*group.lr)});
  if (group.weight_decay) table.push_back({"weight_decay", as_toml(*group.weight_decay)});
  return {.is = std::move(table)};
}
template <class... Types>
TomlValue as_toml(const std::variant<Types...>& value) {
  return std::visit([](const auto& is) { return as_toml(is); }, value);
}
template <class List>
TomlValue as_toml(const List& list) {
  TomlArray items;
  for (const auto& item : list) items.push_back(as_toml(item));
  return {.is = std::move(items)};
}

}  // namespace

TomlValue value_of(const ConfigKey& key, const Config& config) {
  // The fields are reached through a mutable Config; nothing is written here.
  return std::visit([&](auto field) { return as_toml(field(const_cast<Config&>(config))); }, key.field);
}

std::optional<std::string> why_not(const ConfigKey& key, const Config& config) {
  if (!key.where_key.empty()) {
    const auto set = value_of(*find_key(key.where_key), config);
    const auto& values = key.where_values;
    if (std::find(values.begin(), values.end(), std::get<std::string>(set.is)) == values.end()) {
      return fmt::format("has no meaning with {} = {}; allowed with: {}", key.where_key, to_toml(set),
                         fmt::join(values, " | "));
    }
  }
  if (key.reads_tokens && *key.reads_tokens != config.reads_tokens()) {
    const std::string inputs =
        config.model.type == "mlp" ? fmt::format(" and model.inputs = {}", config.model.spec.inputs) : "";
    return fmt::format("has no meaning for a model that reads {} (model.type = \"{}\"{}); allowed with: {}",
                       config.reads_tokens() ? "tokens" : "images or vectors", config.model.type, inputs,
                       *key.reads_tokens ? "llama | gpt2 | mlp with inputs = 0" : "vgg | mlp with inputs more than 0");
  }
  return std::nullopt;
}

}  // namespace bonfire
