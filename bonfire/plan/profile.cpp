#include "bonfire/plan/profile.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"

namespace bonfire::plan {
namespace {

constexpr std::size_t kMostProfiled = 100'000;

double not_negative(const Json& json, const char* what) {
  const double value = json.number();
  if (!(value >= 0)) json.refuse(fmt::format("{} of {}; allowed: 0 or more", what, value));
  return value;
}

std::int64_t whole_bytes(const Json& json, const char* what) {
  const double value = not_negative(json, what);
  if (value > 1e18) json.refuse(fmt::format("{} of {}; allowed: up to 1e18", what, value));
  return static_cast<std::int64_t>(value);
}

Profile read_own(const Json& json, std::string_view wanted) {
  Profile profile{.model = json.at("model").string(),
                  .batch = json.at("batch").integer(),
                  .microbatch = json.at("microbatch").integer(),
                  .device = json.at("device").string()};
  if (profile.batch < 1 || profile.microbatch < 1 || profile.batch % profile.microbatch != 0)
    json.at("microbatch")
        .refuse(fmt::format("microbatches of {} samples in minibatches of {}; allowed: a divisor", profile.microbatch,
                            profile.batch));
  if (!wanted.empty() && wanted != profile.model)
    json.at("model").refuse(fmt::format("is a profile of '{}', not of '{}'", profile.model, wanted));
  for (const auto& unit : json.at("units").items())
    profile.units.push_back({.name = unit.at("name").string(),
                             .forward = not_negative(unit.at("forward_ms"), "a time") / 1e3,
                             .backward = not_negative(unit.at("backward_ms"), "a time") / 1e3,
                             .forward_spread = not_negative(unit.at("forward_spread_ms"), "a spread") / 1e3,
                             .backward_spread = not_negative(unit.at("backward_spread_ms"), "a spread") / 1e3,
                             .output_bytes = whole_bytes(unit.at("output_bytes"), "a size"),
                             .parameter_bytes = whole_bytes(unit.at("parameter_bytes"), "a size"),
                             .state_bytes = whole_bytes(unit.at("state_bytes"), "a size"),
                             .saved_bytes = whole_bytes(unit.at("saved_bytes"), "a size")});
  if (profile.units.empty()) json.at("units").refuse("is empty; a model has at least one Unit");
  return profile;
}

// A graph of PipeDream's, as far as it is read.
struct PipeDreamGraph {
  std::vector<UnitProfile> nodes;
  std::vector<std::string> operations;
  std::vector<std::pair<int, int>> edges;
  std::vector<char> left_out;
};

PipeDreamGraph read_graph(const Json& json) {
  PipeDreamGraph graph;
  std::map<std::string, int> numbers;
  for (const auto& node : json.at("nodes").items()) {
    const auto cells = node.items();
    if (cells.size() != 6)
      node.refuse(
          fmt::format("has {} cells; allowed: node, op, fwd_ms, bwd_ms, activation_bytes, param_bytes", cells.size()));
    const auto& name = cells[0].string();
    if (!numbers.emplace(name, static_cast<int>(graph.nodes.size())).second)
      node.refuse(fmt::format("'{}' comes a second time", name));
    // Of an operation with several outputs, a list.
    std::int64_t output = 0;
    if (cells[4].is_list())
      for (const auto& one : cells[4].items()) output += whole_bytes(one, "a size");
    else
      output = whole_bytes(cells[4], "a size");
    const auto parameters = whole_bytes(cells[5], "a size");
    graph.operations.push_back(cells[1].string());
    // A graph says nothing of gradients and momentum, which have the size of the parameters.
    graph.nodes.push_back({.name = fmt::format("{} {}", name, cells[1].string()),
                           .forward = not_negative(cells[2], "a time") / 1e3,
                           .backward = not_negative(cells[3], "a time") / 1e3,
                           .output_bytes = output,
                           .parameter_bytes = parameters,
                           .state_bytes = 2 * parameters,
                           .saved_bytes = output});
  }
  for (const auto& edge : json.at("edges").items()) {
    const auto ends = edge.items();
    if (ends.size() != 2) edge.refuse(fmt::format("has {} ends; allowed: 2", ends.size()));
    const auto number = [&](const Json& end) {
      const auto found = numbers.find(end.string());
      if (found == numbers.end()) end.refuse(fmt::format("'{}' is no node of this graph", end.string()));
      return found->second;
    };
    graph.edges.emplace_back(number(ends[0]), number(ends[1]));
  }
  graph.left_out.assign(graph.nodes.size(), false);
  return graph;
}

// Of the nodes at one end of the graph, those whose operation begins so are left out.
void leave_out(PipeDreamGraph& graph, bool sources, std::string_view operation) {
  std::vector<char> inner(graph.nodes.size());
  const auto left_out = [&](int node) { return graph.left_out[static_cast<std::size_t>(node)] != 0; };
  for (const auto& [from, to] : graph.edges)
    if (!left_out(from) && !left_out(to)) inner[static_cast<std::size_t>(sources ? to : from)] = true;
  for (std::size_t node = 0; node < graph.nodes.size(); ++node)
    if (!inner[node] && graph.operations[node].starts_with(operation)) graph.left_out[node] = true;
}

Profile read_pipedream(const Json& json, std::string_view wanted) {
  const auto models = json.at("models").members();
  std::vector<std::string> names;
  for (const auto& [name, model] : models) names.push_back(name);
  if (wanted.empty() && names.size() == 1) wanted = names.front();
  const auto found = std::find(names.begin(), names.end(), wanted);
  if (found == names.end()) json.at("models").refuse(fmt::format("model '{}'; allowed: {}", wanted, fmt::join(names, ", ")));
  const auto& model = models[static_cast<std::size_t>(found - names.begin())].second;
  PipeDreamGraph graph = read_graph(model);
  leave_out(graph, /*sources=*/true, "Input");
  leave_out(graph, /*sources=*/false, "__getitem__");
  Profile profile{.model = std::string(wanted), .device = "as published"};
  std::vector<int> number(graph.nodes.size(), -1);
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    if (graph.left_out[node]) continue;
    number[node] = static_cast<int>(profile.units.size());
    profile.units.push_back(std::move(graph.nodes[node]));
  }
  if (profile.units.empty()) model.refuse("has no operation that takes time");
  for (const auto& [from, to] : graph.edges) {
    const int a = number[static_cast<std::size_t>(from)], b = number[static_cast<std::size_t>(to)];
    if (a >= 0 && b >= 0) profile.edges.emplace_back(a, b);
  }
  if (profile.edges.empty() && profile.units.size() > 1) model.refuse("has no edges between its nodes");
  return profile;
}

}  // namespace

Profile read_profile(const std::filesystem::path& file, std::string_view model) {
  const Json json = read_json(file);
  if (json.find("models")) return read_pipedream(json, model);
  if (!json.find("units")) json.refuse("is no profile: it has neither 'units', as bonfire profile writes, nor 'models'");
  Profile profile = read_own(json, model);
  if (profile.units.size() > kMostProfiled)
    json.refuse(fmt::format("has {} Units; allowed: up to {}", profile.units.size(), kMostProfiled));
  return profile;
}

std::string to_json(const Profile& profile) {
  require(profile.chain(), "a profile of a branching graph is not written");
  auto units = nlohmann::ordered_json::array();
  for (const auto& unit : profile.units)
    units.push_back({{"name", unit.name},
                     {"forward_ms", 1e3 * unit.forward},
                     {"backward_ms", 1e3 * unit.backward},
                     {"forward_spread_ms", 1e3 * unit.forward_spread},
                     {"backward_spread_ms", 1e3 * unit.backward_spread},
                     {"output_bytes", unit.output_bytes},
                     {"parameter_bytes", unit.parameter_bytes},
                     {"state_bytes", unit.state_bytes},
                     {"saved_bytes", unit.saved_bytes}});
  const nlohmann::ordered_json json{{"model", profile.model},
                                    {"batch", profile.batch},
                                    {"microbatch", profile.microbatch},
                                    {"device", profile.device},
                                    {"units", std::move(units)}};
  return json.dump(1) + "\n";
}

}  // namespace bonfire::plan
