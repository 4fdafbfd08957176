#include "bonfire/pipeline/stage_wrappings.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/comm/hear.h"
#include "bonfire/shard/wrapping_names.h"

namespace bonfire {
namespace {

// One line for each name, its kind first.
void write_names(std::string& words, char kind, const std::vector<std::string>& names) {
  for (const auto& name : names) words += kind + name + '\n';
}

void read_names(const std::string& words, WrappingNames& names) {
  std::istringstream lines(words);
  for (std::string line; std::getline(lines, line);) {
    auto& kind = line.front() == 'm' ? names.modules : line.front() == 'p' ? names.parameters : names.types;
    // Several stages have Units of one type.
    if (auto name = line.substr(1); std::find(kind.begin(), kind.end(), name) == kind.end()) kind.push_back(std::move(name));
  }
}

// What the stages of all ranks have.
WrappingNames names_of_all(const Group& pipeline, const std::map<int, torch::nn::Module*>& modules, c10::Device device) {
  std::string own;
  for (const auto& [stage, module] : modules) {
    const auto names = names_of(*module);
    write_names(own, 'm', names.modules);
    write_names(own, 'p', names.parameters);
    write_names(own, 't', names.types);
  }
  WrappingNames all;
  for (int rank = 0; rank < pipeline.size(); ++rank) read_names(hear(pipeline, own, rank, device), all);
  std::sort(all.types.begin(), all.types.end());
  return all;
}

}  // namespace

std::map<int, Wrapping> wrappings_of_stages(const Group& pipeline, const std::map<int, torch::nn::Module*>& modules,
                                            const Wrapping& wrapping, c10::Device device) {
  const auto asked = names_in(wrapping);
  if (!asked.empty()) require_known_names(wrapping, names_of_all(pipeline, modules, device), "any stage");
  std::map<int, Wrapping> wrappings;
  for (const auto& [stage, module] : modules)
    wrappings.emplace(stage, without_names(wrapping, names_missing(asked, names_of(*module))));
  return wrappings;
}

}  // namespace bonfire
