#include "bonfire/train/memory_need.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"

namespace bonfire {

std::string layout_line(const Config& config) {
  const auto& layout = config.layout;
  const auto memory = predict_memory(config);
  if (layout.server > 0) {
    const auto served = served_of(config);
    const auto flats = plan::served_flats(model_of(config), served_worker_of(config), served);
    return fmt::format(
        "{} parameter server{} ({}) and {} worker{}; a worker holds {} of model state, a server {} (predicted)",
        layout.server, layout.server == 1 ? "" : "s", layout.server_mode, served.workers, served.workers == 1 ? "" : "s",
        format_bytes(plan::worker_state_bytes(flats, served)), format_bytes(plan::server_state_bytes(flats, served)));
  }
  const std::string replicas = fmt::format("{} replica{}", layout.replicate, layout.replicate == 1 ? "" : "s");
  if (runs_pipedream(config)) {
    const auto robin = robin_of(config);
    return fmt::format("{} stages ({}) with replicas {}; a rank holds {} of model state, {} at its peak (predicted)",
                       robin.replicas.size(), layout.schedule, fmt::join(robin.replicas, "-"),
                       format_bytes(memory.state.total()), format_bytes(memory.total()));
  }
  const std::string pipeline =
      layout.pipeline == 1 ? "" : fmt::format("pipeline {} ({}) x ", layout.pipeline, layout.schedule);
  const std::string split =
      layout.tensor == 1 ? ""
                         : fmt::format(" x tensor {}{}", layout.tensor, layout.sequence_parallel ? " with sequences" : "");
  const std::string shared =
      layout.context == 1 ? "" : fmt::format(" x context {} by {}", layout.context, layout.context_attention);
  return fmt::format("{}{}{}{}; a rank holds {} of model state, {} at its peak (predicted)", pipeline,
                     layout.shard == 1 ? replicas + ", nothing sharded"
                                       : fmt::format("{} x shard {} ({})", replicas, layout.shard, layout.sharded),
                     shared, split, format_bytes(memory.state.total()), format_bytes(memory.total()));
}

void require_memory(const Config& config) {
  const std::int64_t cap = config.run.memory_cap.count;
  const std::int64_t needed = predict_memory(config).total();
  if (cap == 0 || needed <= cap) return;
  if (config.layout.pipeline > 1 || runs_pipedream(config))
    fail_key(config, "run.memory_cap",
             fmt::format("a rank of this pipeline needs {} ({} bytes)", format_bytes(needed), needed));
  fail_key(config, "run.memory_cap",
           plan::does_not_fit(wrapped_model_of(config), data_parallel_of(config), memory_options_of(config), cap));
}

void fail_for_memory(const Config& config, const std::string& refused) {
  const std::int64_t predicted = predict_memory(config).total();
  const std::int64_t cap = config.run.memory_cap.count;
  // Something that needs less than this layout was thought to; with a cap, no more than that either.
  const std::int64_t most = cap > 0 ? std::min(cap, predicted - 1) : predicted - 1;
  // What would fit is known of data parallelism.
  std::optional<plan::Fit> fit;
  if (config.layout.pipeline == 1)
    fit = plan::smallest_fit(wrapped_model_of(config), data_parallel_of(config), memory_options_of(config), most);
  std::string advice = "use a smaller train.microbatch, or more ranks";
  if (fit)
    advice = fmt::format("layout.shard = {} with layout.sharded = \"{}\" would {}: {}", fit->shard, plan::name_of(fit->what),
                         cap > 0 ? "fit" : "need less", format_bytes(fit->bytes));
  fail(
      "out of memory: {}; layout.shard = {} with layout.sharded = \"{}\" was predicted to need {} ({} bytes) on each rank; "
      "{}",
      refused, config.layout.shard, config.layout.sharded, format_bytes(predicted), predicted, advice);
}

}  // namespace bonfire
