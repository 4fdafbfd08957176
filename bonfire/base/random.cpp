#include "bonfire/base/random.h"

#include <cmath>
#include <numbers>

namespace bonfire {
namespace {

// SplitMix64's finaliser: spreads nearby numbers over all 64 bits.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

Random Random::fork(std::uint64_t number) const { return Random(mix(key_ ^ mix(number))); }

Random Random::fork(std::string_view name) const {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3ULL;
  return fork(mix(hash));
}

std::array<std::uint32_t, 4> Random::block(std::uint64_t block) const {
  constexpr std::uint64_t m0 = 0xD2511F53, m1 = 0xCD9E8D57;
  constexpr std::uint32_t w0 = 0x9E3779B9, w1 = 0xBB67AE85;
  std::array<std::uint32_t, 4> c{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), 0, 0};
  auto k0 = static_cast<std::uint32_t>(key_);
  auto k1 = static_cast<std::uint32_t>(key_ >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = m0 * c[0], p1 = m1 * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += w0;
    k1 += w1;
  }
  return c;
}

std::uint64_t Random::bits(std::uint64_t index) const {
  const auto words = block(index >> 1);
  const auto at = (index & 1) * 2;
  return words[at] | static_cast<std::uint64_t>(words[at + 1]) << 32;
}

double Random::uniform(std::uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }

std::uint64_t Random::below(std::uint64_t index, std::uint64_t bound) const {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(bits(index)) * bound) >> 64);
}

double Random::normal(std::uint64_t index) const {
  // Box-Muller on the two words of one block: index 2k takes the cosine, 2k + 1 the sine.
  const auto words = block(index >> 1);
  const double radius = std::sqrt(-2 * std::log((words[0] + 1.0) * 0x1p-32));
  const double angle = 2 * std::numbers::pi * (words[1] * 0x1p-32);
  return radius * ((index & 1) ? std::sin(angle) : std::cos(angle));
}

}  // namespace bonfire
