#include "bonfire/train/metrics.h"

#include <fstream>

#include <nlohmann/json.hpp>

namespace bonfire {
namespace {

// The step of a whole line, nothing for what is no such line.
std::optional<std::int64_t> step_of(const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) return std::nullopt;
  return object["step"].get<std::int64_t>();
}

// Leaves those lines of the file that are before `first_step`. False where there are none.
bool keep_lines(const std::filesystem::path& path, std::int64_t first_step) {
  if (first_step <= 0 || !std::filesystem::is_regular_file(path)) return false;
  std::string kept;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto step = step_of(line);
    if (step && *step < first_step) kept += line + '\n';
  }
  file.close();
  write_file(path, kept);
  return !kept.empty();
}

}  // namespace

std::string to_json(const StepMetrics& metrics) {
  nlohmann::ordered_json line{{"step", metrics.step},
                              {"loss", metrics.loss},
                              {"grad_norm", metrics.grad_norm},
                              {"lr", metrics.lr},
                              {"tokens_per_second", metrics.tokens_per_second},
                              {"memory_bytes", metrics.memory_bytes},
                              {"skipped", metrics.skipped}};
  if (metrics.staleness) line["staleness"] = *metrics.staleness;
  if (!metrics.stale_stages.empty()) line["staleness_by_stage"] = metrics.stale_stages;
  if (metrics.eval_loss) line["eval_loss"] = *metrics.eval_loss;
  return line.dump();
}

std::optional<std::int64_t> last_step(const std::filesystem::path& path) {
  std::optional<std::int64_t> last;
  if (!std::filesystem::is_regular_file(path)) return last;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (const auto step = step_of(line)) last = step;
  return last;
}

MetricsFile::MetricsFile(const std::filesystem::path& path, std::int64_t first_step)
    : file_(path, keep_lines(path, first_step) ? RunFile::Start::at_end : RunFile::Start::empty) {}

void MetricsFile::write(const StepMetrics& metrics) { file_.append(to_json(metrics) + '\n'); }

}  // namespace bonfire
