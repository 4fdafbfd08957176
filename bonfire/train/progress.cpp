#include "bonfire/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

#include "bonfire/base/size.h"

namespace bonfire {
namespace {

constexpr Nanoseconds between_drawings = 100'000'000;
constexpr int bar_width = 24;

std::string without_space(std::string text) {
  std::erase(text, ' ');
  return text;
}

std::int64_t rounded(double value) { return std::isfinite(value) ? std::llround(value) : 0; }

}  // namespace

std::string step_line(const StepMetrics& metrics) {
  auto line = fmt::format("step: {}  loss: {:.5f}  grad_norm: {:.4f}  memory: {}  tps: {}", metrics.step, metrics.loss,
                          metrics.grad_norm, without_space(format_bytes(metrics.memory_bytes)),
                          format_count(rounded(metrics.tokens_per_second)));
  if (metrics.eval_loss) line += fmt::format("  eval_loss: {:.5f}", *metrics.eval_loss);
  if (metrics.staleness) line += fmt::format("  staleness: {:g}", *metrics.staleness);
  if (metrics.skipped) line += fmt::format("  skipped: {}", metrics.skipped);
  return line;
}

int ProgressLine::columns_of(int file) {
  winsize size{};
  return ::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

ProgressLine::Options ProgressLine::to_stderr() {
  Options options;
  options.terminal = ::isatty(STDERR_FILENO) != 0;
  options.columns = [] { return columns_of(STDERR_FILENO); };
  options.write = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  return options;
}

ProgressLine::ProgressLine(Options options) : options_(std::move(options)), start_(options_.now()) {}

ProgressLine::~ProgressLine() {
  if (drawn_) options_.write("\n");
}

std::string ProgressLine::bar(const StepMetrics& metrics, int columns) const {
  const double share = std::clamp(
      static_cast<double>(metrics.step) / static_cast<double>(std::max<std::int64_t>(options_.steps, 1)), 0.0, 1.0);
  const auto filled = static_cast<std::size_t>(share * bar_width);
  const auto done = metrics.step - options_.first_step;
  const auto left = std::max<std::int64_t>(options_.steps - metrics.step, 0);
  const double elapsed = static_cast<double>(options_.now() - start_) * 1e-9;
  const double seconds = left == 0 || done <= 0 ? elapsed : elapsed / static_cast<double>(done) * static_cast<double>(left);
  auto line =
      fmt::format("[{}{}] {}/{}  loss {:.4f}  {} tokens/s  {} {}", std::string(filled, '='),
                  std::string(bar_width - filled, ' '), metrics.step, options_.steps, metrics.loss,
                  format_count(rounded(metrics.tokens_per_second)), left == 0 ? "took" : "left", format_seconds(seconds));
  if (metrics.skipped) line += fmt::format("  {} skipped", metrics.skipped);
  // A line that wraps cannot be drawn again in place.
  line.resize(std::min(line.size(), static_cast<std::size_t>(std::max(columns - 1, 0))));
  return line;
}

void ProgressLine::step_done(const StepMetrics& metrics) {
  const bool edge = !std::exchange(began_, true) || metrics.step >= options_.steps;
  if (!options_.terminal) {
    if (edge || metrics.eval_loss || metrics.step % std::max<std::int64_t>(options_.every, 1) == 0)
      options_.write(step_line(metrics) + "\n");
    return;
  }
  const auto now = options_.now();
  if (!edge && now - drawn_at_ < between_drawings) return;
  const int columns = options_.columns();
  // A window that has become narrower has wrapped what was drawn, which cannot be drawn over then: it is left behind.
  const bool wrapped = drawn_ && width_ >= static_cast<std::size_t>(std::max(columns, 1));
  const auto line = bar(metrics, columns);
  options_.write((wrapped ? "\n" : "\r") + line + "\033[K");
  width_ = line.size();
  drawn_at_ = now;
  drawn_ = true;
}

void ProgressLine::clear() {
  if (std::exchange(drawn_, false)) options_.write("\r\033[K");
  drawn_at_ = 0;
}

}  // namespace bonfire
