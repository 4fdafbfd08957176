#include "bonfire/train/report.h"

#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/size.h"

namespace bonfire {
namespace {

// JSON has no NaN: a loss that is none is null.
nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(); }

std::string per_cent(double share) { return fmt::format("{:.1f}%", 100 * share); }

}  // namespace

std::string to_json(const TrainReport& report) {
  nlohmann::json json{
      {"name", report.name},
      {"steps", report.steps},
      {"skipped", report.skipped},
      {"loss_first", number(report.loss_first)},
      {"loss_last", number(report.loss_last)},
      {"tokens_per_second", number(report.tokens_per_second)},
      {"step_ms", number(report.step_ms)},
      {"peak_memory_bytes", report.peak_memory_bytes},
      {"predicted_memory_bytes", report.predicted_memory_bytes},
      {"exposed_communication", report.exposed_communication ? number(*report.exposed_communication) : nlohmann::json()}};
  if (report.resumed_after > 0) json["resumed_after"] = report.resumed_after;
  if (!report.run_folder.empty()) json["run_folder"] = report.run_folder;
  if (report.entropy_floor) json["entropy_floor"] = *report.entropy_floor;
  if (report.eval_loss) json["eval_loss"] = number(*report.eval_loss);
  if (report.stopped) json["stopped"] = true;
  if (!report.checkpoint.empty()) json["checkpoint"] = report.checkpoint;
  if (report.mfu) json["mfu"] = *report.mfu;
  if (!report.staleness.empty()) {
    json["staleness"] = report.staleness;
    json["stash"] = report.stash;
    json["drains"] = report.drains;
    json["drain_seconds"] = report.drain_seconds;
    if (report.seconds_lost_by_drain) json["seconds_lost_by_drain"] = number(*report.seconds_lost_by_drain);
    json["saves"] = report.saves.count;
    json["save_seconds"] = number(report.saves.seconds);
  }
  if (!report.server.empty()) json["server"] = report.server;
  return json.dump();
}

std::string summary(const TrainReport& report) {
  std::string out = fmt::format("{}: {}\n", report.name, report.what);
  const auto line = [&](const char* what, const std::string& text) { out += fmt::format("  {:<8} {}\n", what, text); };

  const auto steps = [](std::int64_t count) {
    return fmt::format("{} {}", format_count(count), count == 1 ? "step" : "steps");
  };
  const std::string first = report.resumed_after == 0 ? std::string("the first step")
                                                      : fmt::format("step {}, the first since it was resumed",
                                                                    format_count(report.resumed_after + 1));
  std::string loss =
      fmt::format("{:.4f} in {}, {:.4f} after {}", report.loss_first, first, report.loss_last, steps(report.steps));
  if (report.entropy_floor) {
    loss += fmt::format("; the data's entropy is {:.4f}, so it is {} above the floor", *report.entropy_floor,
                        per_cent(report.loss_last / *report.entropy_floor - 1));
  }
  line("loss", loss);
  if (report.eval_loss) line("held out", fmt::format("{:.4f}", *report.eval_loss));
  if (report.skipped) line("skipped", steps(report.skipped) + " without an update");

  if (!report.staleness.empty()) {
    line("stale", fmt::format("gradients were made with weights at most {} updates old, by stage{}",
                              fmt::join(report.staleness, ", "),
                              report.stash ? "" : "; layout.stash = false: they are not the gradients of any weights"));
    std::string drains =
        fmt::format("{}; emptying the pipeline took {} in all", report.drains, format_seconds(report.drain_seconds));
    if (report.seconds_lost_by_drain)
      drains +=
          fmt::format("; with filling the pipeline again, each costs {}", format_seconds(*report.seconds_lost_by_drain));
    line("drains", drains);
    const auto& saves = report.saves;
    if (saves.count > 0)
      line("saves", fmt::format("{} {}, {} in all on the slowest rank", saves.count,
                                saves.drained ? "after drains" : "without drains", format_seconds(saves.seconds)));
  }
  for (const auto& words : report.server) line("server", words);

  // Where steps overlap, a rank has some that take time and others that take none.
  std::string speed = fmt::format("{} tokens/s, {} a step ({})", format_count(std::llround(report.tokens_per_second)),
                                  format_seconds(report.step_ms * 1e-3), report.staleness.empty() ? "median" : "mean");
  if (report.exposed_communication)
    speed += fmt::format(", {} of it waiting for other ranks", per_cent(*report.exposed_communication));
  if (report.mfu) speed += fmt::format(", {} of the GPU's peak", per_cent(*report.mfu));
  line("speed", speed);

  const double off = static_cast<double>(report.predicted_memory_bytes) / static_cast<double>(report.peak_memory_bytes) - 1;
  line("memory", fmt::format("{} predicted, {} measured at the peak of the largest rank ({}{})",
                             format_bytes(report.predicted_memory_bytes), format_bytes(report.peak_memory_bytes),
                             off < 0 ? "" : "+", per_cent(off)));
  if (!report.run_folder.empty()) {
    line("folder", report.run_folder);
    line("weights", report.checkpoint.empty() ? "not kept: checkpoint.every = 0" : report.checkpoint);
  }
  return out;
}

}  // namespace bonfire
