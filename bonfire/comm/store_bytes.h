#pragma once

#include <cstdint>
#include <string>
#include <vector>

// Values as c10d's stores hold them.
namespace bonfire {

using StoreBytes = std::vector<std::uint8_t>;

inline StoreBytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string text_of(const StoreBytes& bytes) { return {bytes.begin(), bytes.end()}; }

}  // namespace bonfire
