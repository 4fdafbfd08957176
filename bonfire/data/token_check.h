#pragma once

#include <chrono>
#include <cstdint>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/data/token_file.h"

namespace bonfire {

// How much of a token file is compared with the vocabulary before training. Whatever the answer, every window is compared
// when it is read.
enum class TokenCheck {
  off,
  sample,  // pieces spread evenly over the file, all of it where it is small: takes seconds at most
  full     // every token, once: what was found is kept beside the file
};

struct TokenCheckOptions {
  TokenCheck how = TokenCheck::full;
  std::int64_t vocab = 0;
  std::uint64_t sample_bytes = 64 << 20;
  std::chrono::milliseconds progress_every = std::chrono::seconds(5);  // a line in the log
  Log log{};
};

// Throws ConfigError with the first token found that is not in {0, ..., vocab - 1}.
//
// After a full check FILE.checked holds the largest token, with the file's size and time of change. Where these still are
// the same, nothing is read again.
BONFIRE_API void check_tokens(const TokenFile& file, const TokenCheckOptions& options);

}  // namespace bonfire
