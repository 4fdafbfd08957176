#include "bonfire/text/utf8.h"

#include <algorithm>
#include <cstring>

namespace bonfire::utf8 {
namespace {

struct Range {
  unsigned char first, last;
};

// Bytes of a character by its first one; 0: none begins so.
std::size_t length_by(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

// What may follow a first byte: neither longer forms than needed, nor surrogates, nor more than U+10FFFF.
Range second_after(unsigned char lead) {
  switch (lead) {
    case 0xE0: return {0xA0, 0xBF};
    case 0xED: return {0x80, 0x9F};
    case 0xF0: return {0x90, 0xBF};
    case 0xF4: return {0x80, 0x8F};
    default: return {0x80, 0xBF};
  }
}

bool eight_letters(const char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return (word & 0x8080808080808080u) == 0;
}

// The first position from `at` on where a text is not well-formed; its size: nowhere.
std::size_t first_fault(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    if (text.size() - at >= 8 && eight_letters(text.data() + at)) {
      at += 8;
      continue;
    }
    const Start start = start_of(text.substr(at));
    if (!start.well_formed) return at;
    at += start.bytes;
  }
  return at;
}

std::uint32_t code_of(std::string_view character) {
  const auto byte = [&](std::size_t at) { return static_cast<std::uint32_t>(static_cast<unsigned char>(character[at])); };
  std::uint32_t code = character.size() == 1 ? byte(0) : byte(0) & (0xFFu >> (character.size() + 1));
  for (std::size_t at = 1; at < character.size(); ++at) code = code << 6 | (byte(at) & 0x3F);
  return code;
}

bool is_space(std::uint32_t code) {
  return (code >= 0x09 && code <= 0x0D) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
         code == 0x3000;
}

}  // namespace

Start start_of(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const std::size_t wanted = length_by(byte(0));
  if (wanted <= 1) return {1, wanted == 1};
  for (std::size_t at = 1; at < wanted; ++at) {
    const Range allowed = at == 1 ? second_after(byte(0)) : Range{0x80, 0xBF};
    if (at == text.size() || byte(at) < allowed.first || byte(at) > allowed.last) return {at, false};
  }
  return {wanted, true};
}

bool well_formed(std::string_view text) { return first_fault(text, 0) == text.size(); }

std::string repaired(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t fault = first_fault(text, at);
    out += text.substr(at, fault - at);
    at = fault;
    if (at == text.size()) break;
    out += replacement;
    at += start_of(text.substr(at)).bytes;
  }
  return out;
}

std::size_t unfinished(std::string_view text) {
  for (std::size_t bytes = 1; bytes <= std::min<std::size_t>(3, text.size()); ++bytes) {
    const auto tail = text.substr(text.size() - bytes);
    const auto lead = static_cast<unsigned char>(tail[0]);
    if ((lead & 0xC0) == 0x80) continue;
    const Start start = start_of(tail);
    return !start.well_formed && start.bytes == bytes && length_by(lead) > bytes ? bytes : 0;
  }
  return 0;
}

std::size_t space_at_start(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t bytes = start_of(text.substr(at)).bytes;
    if (!is_space(code_of(text.substr(at, bytes)))) break;
    at += bytes;
  }
  return at;
}

std::size_t space_at_end(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0) {
    std::size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_space(code_of(text.substr(begin, end - begin)))) break;
    end = begin;
  }
  return text.size() - end;
}

}  // namespace bonfire::utf8
