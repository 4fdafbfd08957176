#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

// Which part of a document a text is: encode_files() cuts documents where no token is cut.
struct EncodeOptions {
  bool begins = true, ends = true;
  bool special_tokens = true;  // those that the tokenizer puts around a document
};

// Encodes text, one thread at a time: it remembers what it has seen.
class BONFIRE_API Encoder {
 public:
  virtual ~Encoder() = default;
  // Appends the tokens of `text`; bytes that are not UTF-8 count as U+FFFD, unless bytes are the tokens.
  virtual void encode(std::string_view text, const EncodeOptions& options, std::vector<std::int64_t>& tokens) = 0;

  std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options = {}) {
    std::vector<std::int64_t> tokens;
    encode(text, options, tokens);
    return tokens;
  }
};

struct DecodeOptions {
  bool special_tokens = true;  // whether they are written too
};

// Turns text into tokens below vocab(), and back. Any thread may use it, and several encoders work side by side.
class BONFIRE_API Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::int64_t vocab() const = 0;
  // The token that a model is trained to end a text with, where it is known.
  virtual std::optional<std::int64_t> end_of_text() const = 0;
  virtual std::unique_ptr<Encoder> encoder() const = 0;
  // Tokens that the vocabulary does not have stand for nothing.
  virtual std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions& options = {}) const = 0;
  // The token with this name, such as "<|endoftext|>".
  virtual std::optional<std::int64_t> find(std::string_view token) const = 0;
};

// Every byte is a token.
BONFIRE_API std::unique_ptr<Tokenizer> byte_tokenizer();

struct SentencePieceOptions {
  std::string model;
  std::string program;  // where bonfire_sentencepiece is
};

// A SentencePiece model. SentencePiece runs in a program of its own: its protocol buffers and torch's, in one process, would
// be taken for each other.
BONFIRE_API std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const SentencePieceOptions& options);

// A tokenizer.json, as the `tokenizers` library writes it, with byte-pair encoding over bytes (GPT-2, Llama 3, Qwen) or over
// characters with bytes to fall back to (Llama 2, Mistral). A tokenizer_config.json beside it names the end of text. Throws
// ConfigError that names what is wrong, or what is not supported.
BONFIRE_API std::unique_ptr<Tokenizer> tokenizer_file(const std::filesystem::path& file);

struct TokenizerChoice {
  std::string name;              // "bytes", a tokenizer.json, a SentencePiece model, or a folder that has one of the two
  std::filesystem::path folder;  // of this command, beside which bonfire_sentencepiece is
};
BONFIRE_API std::unique_ptr<Tokenizer> open_tokenizer(const TokenizerChoice& choice);

}  // namespace bonfire
