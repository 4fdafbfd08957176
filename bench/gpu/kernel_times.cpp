// Where the time of a training step goes, for any program that ends its steps with an Adam kernel: opened by CUDA itself in
// the program that is measured, it notes every kernel, copy and fill of the last steps.
//
//   KERNEL_TIMES=FILE.json CUDA_INJECTION64_PATH=build/libkernel_times.so bonfire bench step …
//
// Writes {"steps", "step_ms", "idle_ms", "kernels": [{"name", "ms", "calls"}]}, each per step. Idle is time in which nothing
// ran on the GPU. Noting takes some microseconds of the host per kernel: the speed of such a run is not the program's.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <cupti.h>
#include <cxxabi.h>

namespace {

constexpr std::size_t kBufferBytes = std::size_t{32} << 20;
constexpr std::size_t kSteps = 3;
constexpr std::uint64_t kShortestStep = 20'000'000;  // ns; an optimizer of several launches is one step's end

struct Span {
  std::uint64_t begin, end;
  int name;
};

struct Notes {
  std::mutex mutex;
  std::vector<Span> spans;
  std::vector<std::string> names;
  std::map<std::string, int, std::less<>> numbers;

  int number(const char* name) {
    const auto [place, added] = numbers.try_emplace(name, static_cast<int>(names.size()));
    if (added) names.emplace_back(name);
    return place->second;
  }
};

// CUPTI's callbacks carry no state, so this one object is the library's.
Notes& notes() {
  static auto* all = new Notes;  // outlives every thread that still notes something
  return *all;
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = kBufferBytes;
  *records = 0;
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  auto& all = notes();
  const std::lock_guard guard(all.mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      all.spans.push_back({kernel->start, kernel->end, all.number(kernel->name)});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
      all.spans.push_back({copy->start, copy->end, all.number("copy")});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      all.spans.push_back({fill->start, fill->end, all.number("fill")});
    }
  }
  std::free(buffer);
}

// The first span after each optimizer.
std::vector<std::size_t> step_begins(const Notes& all) {
  std::vector<std::size_t> begins;
  bool updating = false;
  for (std::size_t i = 0; i < all.spans.size(); ++i) {
    const auto& name = all.names[static_cast<std::size_t>(all.spans[i].name)];
    const bool adam = name.find("adam") != std::string::npos || name.find("Adam") != std::string::npos;
    if (updating && !adam && (begins.empty() || all.spans[i].begin - all.spans[begins.back()].begin > kShortestStep))
      begins.push_back(i);
    updating = adam;
  }
  return begins;
}

std::string readable(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string out = status == 0 ? text : name;
  std::free(text);
  for (char& c : out)
    if (c == '"' || c == '\\') c = '\'';
  return out.substr(0, 300);
}

void write_times() {
  cuptiActivityFlushAll(1);
  auto& all = notes();
  const std::lock_guard guard(all.mutex);
  const char* path = std::getenv("KERNEL_TIMES");
  std::sort(all.spans.begin(), all.spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const auto begins = step_begins(all);
  if (!path || begins.size() < kSteps + 1) return;
  const std::size_t first = begins[begins.size() - kSteps - 1], last = begins.back();
  struct Sum {
    double ms = 0;
    int calls = 0;
  };
  std::map<int, Sum> sums;
  double idle = 0;
  std::uint64_t end = all.spans[first].begin;
  for (std::size_t i = first; i < last; ++i) {
    const auto& span = all.spans[i];
    sums[span.name].ms += static_cast<double>(span.end - span.begin) * 1e-6;
    sums[span.name].calls += 1;
    if (span.begin > end) idle += static_cast<double>(span.begin - end) * 1e-6;
    end = std::max(end, span.end);
  }
  std::FILE* file = std::fopen(path, "w");
  if (!file) return;
  const double whole = static_cast<double>(all.spans[last].begin - all.spans[first].begin) * 1e-6;
  std::fprintf(file, "{\"steps\": %zu, \"step_ms\": %.3f, \"idle_ms\": %.3f, \"kernels\": [", kSteps, whole / kSteps,
               idle / kSteps);
  std::vector<std::pair<int, Sum>> sorted(sums.begin(), sums.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  for (std::size_t i = 0; i < sorted.size(); ++i)
    std::fprintf(file, "%s\n {\"name\": \"%s\", \"ms\": %.4f, \"calls\": %.1f}", i ? "," : "",
                 readable(all.names[static_cast<std::size_t>(sorted[i].first)]).c_str(), sorted[i].second.ms / kSteps,
                 static_cast<double>(sorted[i].second.calls) / kSteps);
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  std::size_t bytes = kBufferBytes, size = sizeof(bytes);
  cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_SIZE, &size, &bytes);
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (const auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET})
    cuptiActivityEnable(kind);
  std::atexit(write_times);
  return 1;
}
