#include "bonfire/train/config.h"

#include <algorithm>
#include <cmath>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/train/config_keys.h"

namespace bonfire {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const auto& word : words) out += (out.empty() ? "" : ", ") + word;
  return out;
}

std::string guess(const std::string& typed, const std::vector<std::string>& words) {
  const std::string word = nearest(typed, words);
  return word.empty() ? "" : fmt::format("; did you mean {}?", word);
}

const LaterKey* find_later(const std::string& name) {
  const auto& keys = later_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const LaterKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

// Reads one value into its field, or says what is wrong with it.
class Assignment {
 public:
  Assignment(Config& config, const ConfigKey& key, std::string where)
      : config_(config), key_(key), where_(std::move(where)) {}

  void set(const TomlValue& value) {
    std::visit([&](auto field) { read(field(config_), value); }, key_.field);
    config_.origin[key_.name] = where_;
  }

 private:
  [[noreturn]] void refuse(const TomlValue& value, const std::string& problem) {
    fail_config("{}: {} = {}: {}; allowed: {}", where_, key_.name, to_toml(value), problem, allowed_text(key_));
  }

  void read(bool& field, const TomlValue& value) {
    if (!std::holds_alternative<bool>(value.is)) refuse(value, "is " + kind_of(value));
    field = std::get<bool>(value.is);
  }
  void read(std::int64_t& field, const TomlValue& value) {
    if (const auto* word = std::get_if<std::string>(&value.is); word && *word == "auto" && key_.section() == "layout") {
      refuse(value, "the planner is not available in this version");
    }
    if (!std::holds_alternative<std::int64_t>(value.is)) refuse(value, "is " + kind_of(value));
    field = std::get<std::int64_t>(value.is);
    check_range(static_cast<double>(field), value);
  }
  void read(double& field, const TomlValue& value) {
    if (const auto* integer = std::get_if<std::int64_t>(&value.is)) {
      field = static_cast<double>(*integer);
    } else if (const auto* number = std::get_if<double>(&value.is)) {
      field = *number;
    } else {
      refuse(value, "is " + kind_of(value));
    }
    check_range(field, value);
  }
  void read(std::string& field, const TomlValue& value) {
    if (!std::holds_alternative<std::string>(value.is)) refuse(value, "is " + kind_of(value));
    field = std::get<std::string>(value.is);
    check_choice(field, value);
  }
  void read(std::vector<std::string>& field, const TomlValue& value) {
    const auto* list = std::get_if<TomlArray>(&value.is);
    if (!list) refuse(value, "is " + kind_of(value));
    field.clear();
    for (const auto& item : *list) {
      if (!std::holds_alternative<std::string>(item.is)) refuse(value, "holds " + kind_of(item));
      field.push_back(std::get<std::string>(item.is));
      check_choice(field.back(), value);
    }
  }
  void read(std::vector<std::int64_t>& field, const TomlValue& value) {
    const auto* list = std::get_if<TomlArray>(&value.is);
    if (!list) refuse(value, "is " + kind_of(value));
    field.assign(list->size(), 0);
    for (std::size_t i = 0; i < field.size(); ++i) read(field[i], (*list)[i]);
  }
  void read(std::array<double, 2>& field, const TomlValue& value) {
    const auto* list = std::get_if<TomlArray>(&value.is);
    if (!list) refuse(value, "is " + kind_of(value));
    if (list->size() != field.size()) refuse(value, fmt::format("holds {} values", list->size()));
    for (std::size_t i = 0; i < field.size(); ++i) read(field[i], (*list)[i]);
  }

  void read(Bytes& field, const TomlValue& value) {
    if (const auto* text = std::get_if<std::string>(&value.is)) {
      const auto bytes = parse_bytes(*text);
      if (!bytes) refuse(value, "is not a number of bytes");
      field.count = *bytes;
      check_range(static_cast<double>(field.count), value);
    } else {
      read(field.count, value);
    }
  }
  void read(SwitchOrNumber& field, const TomlValue& value) {
    if (std::holds_alternative<bool>(value.is))
      field = std::get<bool>(value.is);
    else
      read(field.emplace<std::int64_t>(), value);
  }
  void read(WordOrNumber& field, const TomlValue& value) {
    if (std::holds_alternative<std::string>(value.is))
      read(field.emplace<std::string>(), value);
    else
      read(field.emplace<std::int64_t>(), value);
  }

  void read(WordOrCounts& field, const TomlValue& value) {
    if (std::holds_alternative<std::string>(value.is))
      read(field.emplace<std::string>(), value);
    else
      read(field.emplace<std::vector<std::int64_t>>(), value);
  }

  void read(std::vector<OptimizerGroup>& field, const TomlValue& value) {
    const auto* list = std::get_if<TomlArray>(&value.is);
    if (!list) refuse(value, "is " + kind_of(value));
    field.clear();
    for (const auto& item : *list) {
      const auto* table = std::get_if<TomlTable>(&item.is);
      if (!table) refuse(value, "holds " + kind_of(item));
      auto& group = field.emplace_back();
      for (const auto& [key, given] : *table) {
        if (key == "match" && std::holds_alternative<std::string>(given.is))
          group.match = {std::get<std::string>(given.is)};
        else if (key == "match")
          read(group.match, given);
        else if (key == "lr")
          read(group.lr.emplace(), given);
        else if (key == "weight_decay")
          read(group.weight_decay.emplace(), given);
        else
          refuse(value, fmt::format("{} is not a setting of a group{}", key, guess(key, {"match", "lr", "weight_decay"})));
      }
      if (group.match.empty()) refuse(value, "a group without `match` applies to no parameter");
      if (!group.lr && !group.weight_decay) refuse(value, "a group without a setting changes nothing");
    }
  }

  void check_choice(const std::string& word, const TomlValue& value) {
    const auto& choices = key_.choices;
    if (choices.empty() || std::find(choices.begin(), choices.end(), word) != choices.end()) return;
    if (!key_.later.empty()) refuse(value, key_.later + " is not available in this version");
    refuse(value, "is not a choice" + guess(word, choices));
  }

  void check_range(double number, const TomlValue& value) {
    const auto& range = key_.range;
    if (!std::isfinite(number)) refuse(value, "is not finite");
    const bool low = (range.at_least && number < *range.at_least) || (range.more_than && number <= *range.more_than);
    const bool high = (range.at_most && number > *range.at_most) || (range.less_than && number >= *range.less_than);
    if (high && !key_.later.empty()) refuse(value, key_.later + " is not available in this version");
    if (low) refuse(value, "is too small");
    if (high) refuse(value, "is too large");
  }

  Config& config_;
  const ConfigKey& key_;
  std::string where_;
};

const ConfigKey& key_named(const std::string& section, const std::string& key, const TomlValue& value,
                           const std::string& where) {
  const std::string name = section + "." + key;
  if (const ConfigKey* found = find_key(name)) return *found;
  if (const LaterKey* later = find_later(name)) {
    fail_config("{}: {} = {}: {} is not available in this version; remove the key", where, name, to_toml(value),
                later->waits_for);
  }
  const auto keys = keys_of_section(section);
  std::string hint = guess(key, keys);
  if (hint.empty()) {
    // Perhaps it stands in the wrong section.
    for (const auto& other : config_keys()) {
      if (other.key() == key) hint = fmt::format("; did you mean {}?", other.name);
    }
  }
  fail_config("{}: unknown key {} = {}{} allowed in [{}]: {}", where, name, to_toml(value), hint.empty() ? ";" : hint,
              section, joined(keys));
}

// A key that was given, its value and its place.
struct Given {
  const ConfigKey* key;
  TomlValue value;
  std::string where;
};

void read_section(std::vector<Given>& all, const std::string& section, const TomlTable& table, const std::string& file) {
  for (const auto& [key, value] : table) {
    std::string where = fmt::format("{}:{}", file, value.line);
    const ConfigKey& known = key_named(section, key, value, where);
    all.push_back({&known, value, std::move(where)});
  }
}

bool is_section(const std::string& name) {
  const auto sections = config_sections();
  return std::find(sections.begin(), sections.end(), name) != sections.end() ||
         std::any_of(later_keys().begin(), later_keys().end(),
                     [&](const LaterKey& key) { return key.name.rfind(name + ".", 0) == 0; });
}

void read_tables(std::vector<Given>& all, const TomlTable& table, const std::string& file) {
  const auto sections = config_sections();
  for (const auto& [name, value] : table) {
    const auto* section = std::get_if<TomlTable>(&value.is);
    if (!section) {
      std::string hint;
      for (const auto& key : config_keys()) {
        if (key.key() == name && hint.empty()) hint = fmt::format("; did you mean {} in [{}]?", name, key.section());
      }
      fail_config("{}:{}: {} = {} stands outside of a section{} sections: {}", file, value.line, name, to_toml(value),
                  hint.empty() ? ";" : hint, joined(sections));
    }
    if (!is_section(name)) {
      const std::string hint = guess(name, sections);
      fail_config("{}:{}: unknown section [{}]{} allowed: {}", file, value.line, name, hint.empty() ? ";" : hint,
                  joined(sections));
    }
    read_section(all, name, *section, file);
  }
}

// "optimizer.lr=1e-3". A string may stand without quotes: the shell has eaten them.
void read_override(std::vector<Given>& all, const std::string& text) {
  const std::string where = "--set " + text;
  const auto equals = text.find('='), dot = text.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
    fail_config("{}: is not an override; allowed: --set section.key=value", where);
  }
  const std::string section = text.substr(0, dot), key = text.substr(dot + 1, equals - dot - 1);
  const std::string raw = text.substr(equals + 1);
  if (!is_section(section)) {
    const auto sections = config_sections();
    const std::string hint = guess(section, sections);
    fail_config("{}: unknown section [{}]{} allowed: {}", where, section, hint.empty() ? ";" : hint, joined(sections));
  }

  TomlValue value{.is = raw};
  const ConfigKey* known = find_key(section + "." + key);
  const bool plain_string =
      known && std::holds_alternative<std::string& (*)(Config&)>(known->field) && raw.find_first_of("\"'") != 0;
  if (!plain_string) {
    try {
      value = parse_toml("value = " + raw, where).at(0).value;
    } catch (const ConfigError&) {
      value.is = raw;  // not TOML: words, whose type the key will judge
    }
  }
  all.push_back({&key_named(section, key, value, where), value, where});
}

void check_applicable(const Config& config) {
  for (const auto& key : config_keys()) {
    if (!config.given(key.name)) continue;
    if (const auto reason = why_not(key, config)) fail_key(config, key.name, *reason);
  }
}

Config from_table(const TomlTable& table, const std::string& name, const std::vector<std::string>& overrides) {
  Config config;
  config.file = name;
  std::vector<Given> all;
  read_tables(all, table, name);
  for (const auto& text : overrides) read_override(all, text);

  // The preset is what the other keys of [model] change, wherever it stands.
  const auto is_preset = [](const Given& given) { return given.key->name == "model.preset"; };
  std::stable_partition(all.begin(), all.end(), is_preset);
  auto given = all.begin();
  for (; given != all.end() && is_preset(*given); ++given) Assignment(config, *given->key, given->where).set(given->value);
  if (!config.model.preset.empty()) {
    config.model.spec = plan::published_model(config.model.preset);
    config.model.type = plan::name_of(config.model.spec.type);
  }
  for (; given != all.end(); ++given) Assignment(config, *given->key, given->where).set(given->value);
  check_applicable(config);
  return config;
}

}  // namespace

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
  return from_table(read_toml(file), file.string(), overrides);
}

Config parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  return from_table(parse_toml(text, name), name, overrides);
}

void fail_key(const Config& config, const std::string& key, const std::string& problem) {
  const ConfigKey* known = find_key(key);
  require(known, "there is no key {} in the table of keys", key);
  const auto origin = config.origin.find(key);
  const std::string where = origin == config.origin.end() ? config.file : origin->second;
  fail_config("{}: {} = {}{}: {}", where, key, to_toml(value_of(*known, config)),
              origin == config.origin.end() ? " (the default)" : "", problem);
}

std::string to_toml(const Config& config) {
  std::string out;
  for (const auto& section : config_sections()) {
    out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
    for (const auto& key : config_keys()) {
      if (key.section() != section || why_not(key, config)) continue;
      out += fmt::format("{} = {}\n", key.key(), to_toml(value_of(key, config)));
    }
  }
  return out;
}

std::string config_reference() {
  const Config defaults;
  std::string out =
      "# The configuration file\n\n"
      "`bonfire train FILE.toml` reads one TOML file. Every key has a default, so a file contains only the keys that differ "
      "from it;\n"
      "`--set section.key=value` overrides the file. Unknown keys, wrong types, values out of range, and keys that do not "
      "apply to the\n"
      "chosen settings are errors before training starts. The run folder contains the resolved configuration.\n\n"
      "This page is generated from the parser's own table: `bonfire doctor --config-reference` prints it.\n";
  for (const auto& section : config_sections()) {
    out += fmt::format("\n## [{}]\n\n{}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n", section,
                       help_of_section(section));
    for (const auto& key : config_keys()) {
      if (key.section() != section) continue;
      std::string allowed = allowed_text(key);
      for (std::size_t at = 0; (at = allowed.find(" | ", at)) != std::string::npos; at += 4) allowed.replace(at, 3, " \\| ");
      std::string help = key.help;
      if (!key.where_key.empty()) {
        help += fmt::format(" Only with `{}` {}.", key.where_key, joined(key.where_values));
      }
      if (key.reads_tokens) {
        help += *key.reads_tokens ? " Only for models that read tokens." : " Only for models that read images or vectors.";
      }
      out += fmt::format("| `{}` | `{}` | {} | {} |\n", key.key(), to_toml(value_of(key, defaults)), allowed, help);
    }
  }
  out +=
      "\n## Not in this version\n\nThese keys are planned. Using one is an error that names the missing feature.\n\n"
      "| key | needs |\n|---|---|\n";
  for (const auto& key : later_keys()) out += fmt::format("| `{}` | {} |\n", key.name, key.waits_for);
  return out;
}

}  // namespace bonfire
