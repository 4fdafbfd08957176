#include "bonfire/train/config_keys.h"

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

const std::vector<ConfigSection>& sections() {
  static const std::vector<ConfigSection> all = {run_section(),    model_section(),      adapter_section(),
                                                 data_section(),   train_section(),      optimizer_section(),
                                                 layout_section(), checkpoint_section(), fault_section()};
  return all;
}

template <class Row>
std::vector<Row> rows_of_all(std::vector<Row> ConfigSection::*rows) {
  std::vector<Row> all;
  for (const auto& section : sections()) all.insert(all.end(), (section.*rows).begin(), (section.*rows).end());
  return all;
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = rows_of_all(&ConfigSection::keys);
  return keys;
}

const std::vector<LaterKey>& later_keys() {
  static const std::vector<LaterKey> keys = rows_of_all(&ConfigSection::later);
  return keys;
}

std::vector<std::string> config_sections() {
  std::vector<std::string> names;
  for (const auto& section : sections())
    if (!section.keys.empty()) names.push_back(section.name);
  return names;
}

const std::string& help_of_section(const std::string& name) {
  for (const auto& section : sections())
    if (section.name == name) return section.help;
  fail("no section [{}]", name);
}

}  // namespace bonfire
