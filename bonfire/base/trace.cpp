#include "bonfire/base/trace.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace bonfire {

void Trace::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<Span> Trace::spans() const {
  const std::lock_guard lock(mutex_);
  return spans_;
}

std::string Trace::events() const {
  auto spans = this->spans();
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.start < b.start; });

  std::map<std::string, int> tracks;  // numbered in the order in which they first appear
  std::vector<std::string> lines;
  const auto line = [&](const nlohmann::json& event) { lines.push_back(event.dump()); };
  line({{"name", "process_name"}, {"ph", "M"}, {"pid", rank_}, {"args", {{"name", fmt::format("rank {}", rank_)}}}});
  for (const auto& span : spans) {
    const auto [at, fresh] = tracks.try_emplace(span.track, static_cast<int>(tracks.size()));
    if (fresh)
      line({{"name", "thread_name"}, {"ph", "M"}, {"pid", rank_}, {"tid", at->second}, {"args", {{"name", span.track}}}});
    nlohmann::json event{{"name", span.name},
                         {"cat", span.category},
                         {"ph", "X"},
                         {"ts", static_cast<double>(span.start) * 1e-3},
                         {"dur", static_cast<double>(span.end - span.start) * 1e-3},
                         {"pid", rank_},
                         {"tid", at->second}};
    if (span.bytes) event["args"] = {{"bytes", span.bytes}};
    line(event);
  }
  return fmt::format("{}", fmt::join(lines, ",\n"));
}

std::string Trace::file(const std::vector<std::string>& events_of_ranks) {
  return fmt::format("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", fmt::join(events_of_ranks, ",\n"));
}

TraceScope::TraceScope(Trace* trace, std::string name, std::string category, std::string track) : trace_(trace) {
  if (trace_) span_ = {std::move(name), std::move(category), std::move(track), now_ns(), 0, 0};
}

TraceScope::~TraceScope() {
  if (!trace_) return;
  span_.end = now_ns();
  trace_->add(std::move(span_));
}

}  // namespace bonfire
