#include "bonfire/train/capturable.h"

#include <fmt/format.h>

#include "bonfire/train/pipedream_model.h"

namespace bonfire {

std::string hindrance_to_device_steps(const Config& config) {
  const auto& layout = config.layout;
  if (runs_pipedream(config)) return fmt::format("layout.schedule = \"{}\": the host runs the schedule", layout.schedule);
  if (layout.pipeline > 1) return fmt::format("layout.pipeline = {}: the host runs the schedule", layout.pipeline);
  if (layout.offload != "none")
    return fmt::format("layout.offload = \"{}\": the host updates what is offloaded", layout.offload);
  if (layout.compression == "powersgd") return "layout.compression = \"powersgd\": the host says what becomes of its errors";
  if (config.train.precision == "fp16") return "train.precision = \"fp16\": the host decides on the scale of the loss";
  if (config.fault.nan_step > 0) return fmt::format("fault.nan_step = {}: that step is another one", config.fault.nan_step);
  return {};
}

// Whatever the host decides or counts anew in each step is one number for ever in a step that was captured.
std::string hindrance_to_graphs(const Config& config) {
  if (auto hindrance = hindrance_to_device_steps(config); !hindrance.empty()) return hindrance;
  if (config.layout.tensor > 1)
    return fmt::format("layout.tensor = {}: what ranks exchange inside of layers", config.layout.tensor);
  if (config.layout.context > 1)
    return fmt::format("layout.context = {}: what ranks exchange inside of layers", config.layout.context);
  if (config.data.documents == "separate") return "data.documents = \"separate\": the host divides every batch anew";
  if (config.layout.recompute_offload) return "layout.recompute_offload = true: the host allocates what inputs are kept in";
  if (config.layout.negotiate_order) return "layout.negotiate_order = true: the hosts agree on every gather";
  if (config.model.spec.dropout > 0)
    return fmt::format("model.dropout = {}: the host draws what is dropped", config.model.spec.dropout);
  if (const auto& adapter = config.model.spec.adapter; adapter.rank > 0 && adapter.dropout > 0)
    return fmt::format("adapter.dropout = {}: the host draws what is dropped", adapter.dropout);
  if (config.run.debug_collectives) return "run.debug_collectives = true: the hosts compare every collective";
  return {};
}

bool wants_graphs(const Config& config, c10::Device device) {
  const auto& asked = config.train.graphs;
  const auto hindrance = hindrance_to_graphs(config);
  if (asked == "on" && device.is_cpu()) fail_key(config, "train.graphs", "the device is a CPU; allowed there: auto | off");
  if (asked == "on" && !hindrance.empty())
    fail_key(config, "train.graphs", fmt::format("does not go with {}; allowed with it: auto | off", hindrance));
  return asked != "off" && !device.is_cpu() && hindrance.empty();
}

std::int64_t steps_to_settle(const Config& config, c10::Device device) {
  if (device.is_cpu()) return 1;
  return wants_graphs(config, device) ? 1 + steps_before_capture + 1 : 2;
}

}  // namespace bonfire
