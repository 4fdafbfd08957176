#include "bonfire/train/metrics.h"

#include <cerrno>
#include <cstring>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// The step of a whole line, nothing for what is no such line.
std::optional<std::int64_t> step_of(const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) return std::nullopt;
  return object["step"].get<std::int64_t>();
}

std::string kept_lines(const std::filesystem::path& path, std::int64_t first_step) {
  std::string kept;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto step = step_of(line);
    if (step && *step < first_step) kept += line + '\n';
  }
  return kept;
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
  if (metrics.eval_loss) line["eval_loss"] = *metrics.eval_loss;
  return line.dump();
}

MetricsFile::MetricsFile(const std::filesystem::path& path, std::int64_t first_step) : path_(path) {
  const auto kept = kept_lines(path, first_step);
  file_.open(path, std::ios::binary | std::ios::trunc);
  file_ << kept << std::flush;
  require(file_.good(), "'{}': cannot be written: {}", path.string(), std::strerror(errno));
}

void MetricsFile::write(const StepMetrics& metrics) {
  file_ << to_json(metrics) + '\n' << std::flush;
  require(file_.good(), "'{}': cannot be written: {}", path_.string(), std::strerror(errno));
}

}  // namespace bonfire
