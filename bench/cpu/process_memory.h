#pragma once

#include <cstdint>
#include <fstream>
#include <string>

// What the kernel says that this process holds in memory, tensors or not: the measure that programs in any language share.
namespace bonfire::bench {

// VmRSS: now; VmHWM: the most since forget_peak_resident().
inline std::int64_t resident_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string word;
  for (std::int64_t kibibytes = 0; status >> word;)
    if (word == field + ":" && status >> kibibytes) return kibibytes * 1024;
  return 0;
}

inline void forget_peak_resident() { std::ofstream("/proc/self/clear_refs") << 5; }

}  // namespace bonfire::bench
