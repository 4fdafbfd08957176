#pragma once

#include <string>
#include <string_view>

#include "bonfire/base/api.h"

namespace bonfire {

// SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104); 32 bytes each.
BONFIRE_API std::string sha256(std::string_view message);
BONFIRE_API std::string hmac_sha256(std::string_view key, std::string_view message);
// 16 hexadecimal digits of the hash: a name for what is too long to be one.
BONFIRE_API std::string short_hash(std::string_view message);
// Lower-case hexadecimal digits.
BONFIRE_API std::string hex(std::string_view bytes);

// True where both are equal; takes the same time wherever they differ.
BONFIRE_API bool same_secret(std::string_view a, std::string_view b);
// 32 hexadecimal digits from the kernel's generator.
BONFIRE_API std::string random_token();

}  // namespace bonfire
