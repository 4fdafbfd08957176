#include "bonfire/text/byte_letters.h"

#include <array>
#include <cstdint>

#include "bonfire/text/utf8.h"

namespace bonfire {
namespace {

constexpr std::uint32_t first_extra = 0x100, extras = 68;

constexpr bool is_visible(std::uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Letters {
  std::array<std::uint32_t, 256> of_byte{};
  std::array<int, first_extra + extras> byte_of{};
};

constexpr Letters make_letters() {
  Letters letters;
  for (auto& byte : letters.byte_of) byte = -1;
  std::uint32_t extra = first_extra;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    letters.of_byte[byte] = is_visible(byte) ? byte : extra++;
    letters.byte_of[letters.of_byte[byte]] = static_cast<int>(byte);
  }
  return letters;
}

constexpr Letters table = make_letters();

}  // namespace

std::string letters_of(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) {
    const std::uint32_t code = table.of_byte[static_cast<unsigned char>(byte)];
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else {
      out += static_cast<char>(0xC0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
  return out;
}

std::optional<std::string> bytes_of_letters(std::string_view letters) {
  std::string out;
  for (std::size_t at = 0; at < letters.size();) {
    const auto start = utf8::start_of(letters.substr(at));
    const auto lead = static_cast<unsigned char>(letters[at]);
    std::uint32_t code = lead;
    if (start.bytes == 2) code = (lead & 0x1Fu) << 6 | (static_cast<unsigned char>(letters[at + 1]) & 0x3Fu);
    if (!start.well_formed || start.bytes > 2 || code >= table.byte_of.size() || table.byte_of[code] < 0)
      return std::nullopt;
    out += static_cast<char>(table.byte_of[code]);
    at += start.bytes;
  }
  return out;
}

}  // namespace bonfire
