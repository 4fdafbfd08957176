#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace bonfire {

// Byte-level vocabularies spell bytes as letters that can be printed, the same in all of them since GPT-2: a byte that is a
// visible character of Latin-1 is that character, and the others follow from U+0100 on.
std::string letters_of(std::string_view bytes);
// Nothing where `letters` has a character that stands for no byte.
std::optional<std::string> bytes_of_letters(std::string_view letters);

}  // namespace bonfire
