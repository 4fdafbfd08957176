#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

// Turns text into tokens below vocab().
class BONFIRE_API Tokenizer {
 public:
  using Take = std::function<void(std::span<const std::int64_t>)>;

  virtual ~Tokenizer() = default;
  virtual std::int64_t vocab() const = 0;
  // Gives the tokens of a text file, as one document, piece by piece. Throws ConfigError where the file cannot be read.
  virtual void encode_file(const std::string& path, const Take& take) const = 0;
};

// Every byte is a token.
BONFIRE_API std::unique_ptr<Tokenizer> byte_tokenizer();

struct SentencePieceOptions {
  std::string model;
  std::string program;  // where bonfire_sentencepiece is
};

// A SentencePiece model; a document ends with its end-of-sentence token where it has one. SentencePiece runs in a program of
// its own: its protocol buffers and torch's, in one process, would be taken for each other.
BONFIRE_API std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const SentencePieceOptions& options);

}  // namespace bonfire
