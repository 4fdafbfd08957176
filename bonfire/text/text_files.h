#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/text/tokenizer.h"

namespace bonfire {

struct EncodeFilesOptions {
  std::vector<std::string> paths{};  // each is one document, or, where its name ends in .jsonl, one for each line
  std::string field = "text";        // of a line's object: where its text is
  int threads = 1;
};

// The tokens of a part of a document, which may be its last part.
using TakeTokens = std::function<void(std::span<const std::int64_t> tokens, bool ends)>;

// Encodes text files on several threads and gives the tokens in the order of the files, one call at a time. A document
// begins and ends with the special tokens that the tokenizer puts there, and ends with its end of text where that is known.
// Throws ConfigError where a file cannot be read, or a line is not as it should be.
BONFIRE_API void encode_files(const Tokenizer& tokenizer, const EncodeFilesOptions& options, const TakeTokens& take);

}  // namespace bonfire
