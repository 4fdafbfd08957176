#include "bonfire/comm/secret.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

constexpr std::size_t kBlock = 64;  // bytes that are hashed at once

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using Digest = std::array<std::uint32_t, 8>;

void hash_block(Digest& digest, const unsigned char* block) {
  std::array<std::uint32_t, 64> word;
  for (std::size_t i = 0; i < 16; ++i)
    word[i] = std::uint32_t{block[4 * i]} << 24 | std::uint32_t{block[4 * i + 1]} << 16 |
              std::uint32_t{block[4 * i + 2]} << 8 | std::uint32_t{block[4 * i + 3]};
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = word[i - 15], b = word[i - 2];
    word[i] = word[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + word[i - 7] +
              (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = digest;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t one =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + word[i];
    const std::uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const Digest add = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < digest.size(); ++i) digest[i] += add[i];
}

}  // namespace

std::string sha256(std::string_view message) {
  Digest digest = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // A one, zeros to the end of a block, and the number of bits in the last eight bytes.
  const std::size_t whole = message.size() / kBlock * kBlock;
  std::string tail(message.substr(whole));
  tail += '\x80';
  while (tail.size() % kBlock != kBlock - 8) tail += '\0';
  for (int shift = 56; shift >= 0; shift -= 8)
    tail += static_cast<char>(static_cast<std::uint64_t>(message.size()) * 8 >> shift & 0xff);

  const auto hash = [&](std::string_view bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += kBlock)
      hash_block(digest, reinterpret_cast<const unsigned char*>(bytes.data() + at));
  };
  hash(message.substr(0, whole));
  hash(tail);
  std::string bytes;
  for (const std::uint32_t part : digest)
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(part >> shift & 0xff);
  return bytes;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string block = key.size() > kBlock ? sha256(key) : std::string(key);
  block.resize(kBlock, '\0');
  const auto padded = [&](char with) {
    std::string mixed = block;
    for (char& byte : mixed) byte = static_cast<char>(byte ^ with);
    return mixed;
  };
  return sha256(padded('\x5c') + sha256(padded('\x36').append(message)));
}

std::string short_hash(std::string_view message) { return hex(std::string_view(sha256(message)).substr(0, 8)); }

std::string hex(std::string_view bytes) {
  std::string digits;
  for (const char byte : bytes) digits += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return digits;
}

bool same_secret(std::string_view a, std::string_view b) {
  // Every byte of both is looked at, whatever the first ones were.
  volatile unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const unsigned char x = i < a.size() ? static_cast<unsigned char>(a[i]) : 0;
    const unsigned char y = i < b.size() ? static_cast<unsigned char>(b[i]) : 0;
    difference = static_cast<unsigned char>(difference | (x ^ y));
  }
  return difference == 0;
}

std::string random_token() {
  char bytes[16];
  const ssize_t got = getrandom(bytes, sizeof bytes, 0);
  if (got != sizeof bytes) fail("the kernel gives no random bytes: {}", std::strerror(errno));
  return hex({bytes, sizeof bytes});
}

}  // namespace bonfire
