#include "bonfire/shard/wrapping_names.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/base/toml.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/nn/unit.h"

namespace bonfire {
namespace {

using Names = std::vector<std::string>;

std::string path_of(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

bool has_name(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void collect_names(torch::nn::Module& module, const std::string& path, WrappingNames& names, std::set<std::string>& types) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) names.parameters.push_back(path_of(path, item.key()));
  for (const auto& child : module.named_children()) {
    const auto inside = path_of(path, child.key());
    names.modules.push_back(inside);
    if (const auto* const seam = unit_of(*child.value(), module)) types.insert(seam->type_name());
    collect_names(*child.value(), inside, names, types);
  }
}

Names difference(const Names& names, const Names& known) {
  Names missing;
  for (const auto& name : names)
    if (!has_name(known, name)) missing.push_back(name);
  return missing;
}

void require_known_paths(const char* kind, const Names& paths, const Names& known) {
  for (const auto& path : difference(paths, known)) {
    const std::string meant = nearest(path, known);
    fail_config("{} '{}' does not exist{}", kind, path, meant.empty() ? "" : fmt::format("; did you mean '{}'?", meant));
  }
}

}  // namespace

WrappingNames names_of(torch::nn::Module& module) {
  WrappingNames names;
  std::set<std::string> types;
  if (const auto* const seam = unit_of(module)) types.insert(seam->type_name());
  collect_names(module, "", names, types);
  names.types.assign(types.begin(), types.end());
  return names;
}

WrappingNames names_in(const Wrapping& wrapping) {
  return {.modules = wrapping.ignored_modules, .parameters = wrapping.ignored_parameters, .types = wrapping.types};
}

WrappingNames names_missing(const WrappingNames& names, const WrappingNames& known) {
  return {.modules = difference(names.modules, known.modules),
          .parameters = difference(names.parameters, known.parameters),
          .types = difference(names.types, known.types)};
}

void require_known_names(const Wrapping& wrapping, const WrappingNames& known, const std::string& holder) {
  require_known_paths("ignored module", wrapping.ignored_modules, known.modules);
  require_known_paths("ignored parameter", wrapping.ignored_parameters, known.parameters);
  for (const auto& type : difference(wrapping.types, known.types))
    fail_config("wrapping type '{}' is not a Unit of {}; there are: {}", type, holder,
                known.types.empty() ? "none" : fmt::format("{}", fmt::join(known.types, ", ")));
}

Wrapping without_names(Wrapping wrapping, const WrappingNames& absent) {
  std::erase_if(wrapping.ignored_modules, [&](const auto& name) { return has_name(absent.modules, name); });
  std::erase_if(wrapping.ignored_parameters, [&](const auto& name) { return has_name(absent.parameters, name); });
  const bool by_type = !wrapping.types.empty();
  std::erase_if(wrapping.types, [&](const auto& name) { return has_name(absent.types, name); });
  // No types at all would be every Unit. What contradicts types stays, for the modules that have them to refuse.
  if (by_type && wrapping.types.empty() && !wrapping.predicate && !wrapping.all_in_one) {
    wrapping.min_parameters = 0;
    wrapping.predicate = [](const std::string&, torch::nn::Module&) { return false; };
  }
  return wrapping;
}

}  // namespace bonfire
