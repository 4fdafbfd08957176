#include <charconv>
#include <filesystem>
#include <numeric>
#include <sstream>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/base/toml.h"
#include "bonfire/plan/partition.h"

namespace bonfire::plan {
namespace {

constexpr int kMostTopologyRanks = 4096;
constexpr const char* kTopologyForms = "8@25e9,4@1.25e9 (count@bytes per second, the lowest level first), or a TOML file";

template <class Number>
std::optional<Number> parsed(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void require_topology(const Topology& topology, const std::string& text) {
  std::int64_t ranks = 1;
  for (const auto& level : topology.levels) {
    if (level.count < 1) fail_config("cluster '{}': a level of {}; allowed: 1 or more", text, level.count);
    if (!(level.bandwidth > 0 && level.bandwidth < 1e18))
      fail_config("cluster '{}': {} bytes per second; allowed: more than 0", text, level.bandwidth);
    ranks *= level.count;
    if (ranks > kMostTopologyRanks)
      fail_config("cluster '{}': more than {} ranks; allowed: up to {}", text, kMostTopologyRanks, kMostTopologyRanks);
  }
  if (topology.levels.empty()) fail_config("cluster '{}' has no levels; allowed: {}", text, kTopologyForms);
  if (topology.memory && *topology.memory <= 0) fail_config("cluster '{}': memory of 0 bytes; allowed: more", text);
}

Topology topology_of_words(const std::string& text) {
  Topology topology;
  std::istringstream in(text);
  for (std::string word; !in.eof();) {
    std::getline(in, word, ',');
    const auto middle = word.find('@');
    const auto count = parsed<int>(std::string_view(word).substr(0, middle));
    const auto bandwidth =
        middle == std::string::npos ? std::nullopt : parsed<double>(std::string_view(word).substr(middle + 1));
    if (!count || !bandwidth)
      fail_config("cluster '{}': '{}' is no level and no file; allowed: {}", text, word, kTopologyForms);
    topology.levels.push_back({*count, *bandwidth});
  }
  return topology;
}

Topology topology_of_file(const std::string& file) {
  Topology topology;
  const auto refuse = [&](const TomlValue& value, const std::string& why) {
    fail_config("{}:{}: {}", file, value.line, why);
  };
  const auto real = [&](const TomlValue& value) {
    if (const auto* integer = std::get_if<std::int64_t>(&value.is)) return static_cast<double>(*integer);
    if (const auto* real = std::get_if<double>(&value.is)) return *real;
    refuse(value, "is " + kind_of(value) + ", must be a number");
    return 0.0;
  };
  const auto read_level = [&](const TomlValue& value) {
    const auto* table = std::get_if<TomlTable>(&value.is);
    if (!table) refuse(value, "level is " + kind_of(value) + "; allowed: [[level]] with count and bandwidth");
    TopologyLevel level{.count = 0};
    for (const auto& [key, entry] : *table) {
      if (key == "count")
        level.count = static_cast<int>(std::min(real(entry), 1e9));
      else if (key == "bandwidth")
        level.bandwidth = real(entry);
      else
        refuse(entry, "unknown key 'level." + key + "'; allowed: count, bandwidth");
    }
    topology.levels.push_back(level);
  };
  for (const auto& [key, value] : read_toml(file)) {
    if (key == "level") {
      const auto* list = std::get_if<TomlArray>(&value.is);
      if (!list) refuse(value, "level is " + kind_of(value) + "; allowed: [[level]], once for each level");
      for (const auto& entry : *list) read_level(entry);
    } else if (key == "memory") {
      const auto* text = std::get_if<std::string>(&value.is);
      topology.memory = text ? parse_bytes(*text) : std::nullopt;
      if (!topology.memory) refuse(value, "memory is no size; allowed: bytes of a rank, such as \"16GiB\"");
    } else {
      refuse(value, "unknown key '" + key + "'; allowed: level, memory");
    }
  }
  return topology;
}

}  // namespace

int Topology::ranks() const {
  return std::accumulate(levels.begin(), levels.end(), 1,
                         [](int all, const TopologyLevel& level) { return all * level.count; });
}

Topology parse_topology(const std::string& text) {
  Topology topology = std::filesystem::is_regular_file(text) ? topology_of_file(text) : topology_of_words(text);
  require_topology(topology, text);
  return topology;
}

}  // namespace bonfire::plan
