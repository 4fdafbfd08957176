#include "bonfire/server/description.h"

#include <sstream>

#include "bonfire/base/error.h"

namespace bonfire {

// A line for each parameter: name, types, number of dimensions, dimensions. Names are paths of modules: nothing in them but
// the end of the line ends a field, so they come last.
std::string describe_unit(const FlatParameter& flat) {
  std::ostringstream text;
  const auto& layout = flat.layout();
  for (std::size_t at = 0; at < layout.segments.size(); ++at) {
    if (!layout.trained(at)) continue;
    const auto& segment = layout.segments[at];
    const auto& region = layout.regions[segment.region];
    const auto& shape = flat.parameters()[at].sizes();
    text << plan::name_of(region.compute) << ' ' << plan::name_of(region.master) << ' ' << shape.size();
    for (const auto size : shape) text << ' ' << size;
    text << ' ' << segment.name << '\n';
  }
  return text.str();
}

plan::ParameterGroup read_unit(const std::string& text) {
  plan::ParameterGroup unit;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string compute, master;
    std::size_t dims = 0;
    plan::ParameterSize parameter;
    fields >> compute >> master >> dims;
    parameter.shape.resize(dims < 64 ? dims : 0);
    parameter.elements = 1;
    for (auto& size : parameter.shape) {
      fields >> size;
      parameter.elements *= size;
    }
    fields.get();
    std::getline(fields, parameter.name);
    require(!parameter.name.empty(), "a worker describes a parameter by '{}'; expected: types, shape and name", line);
    parameter.compute = plan::dtype_of(compute);
    parameter.master = plan::dtype_of(master);
    unit.parameters.push_back(std::move(parameter));
  }
  require(!unit.parameters.empty(), "a worker describes a Unit without trained parameters");
  unit.name = unit.parameters.front().name;
  return unit;
}

plan::FlatLayout layout_of(const plan::ParameterGroup& unit, int servers) {
  return plan::bucket({unit}, {.parts = servers, .one_per_group = true}).front();
}

}  // namespace bonfire
