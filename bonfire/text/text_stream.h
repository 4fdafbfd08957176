#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/text/tokenizer.h"

namespace bonfire {

// Text as its tokens come: what later tokens can no longer change.
class BONFIRE_API TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer, const DecodeOptions& options = {})
      : tokenizer_(tokenizer), options_(options) {}

  // The text that is new. Characters of which bytes are missing wait for the tokens that have those.
  std::string push(std::span<const std::int64_t> tokens);
  // What still waits.
  std::string finish();

 private:
  std::string advance(bool last);

  const Tokenizer& tokenizer_;
  DecodeOptions options_;
  std::vector<std::int64_t> tokens_;  // from before what was given last, because text may depend on what stands before it
  std::size_t given_ = 0;             // of those
};

}  // namespace bonfire
