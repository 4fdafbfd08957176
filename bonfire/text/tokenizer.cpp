#include "bonfire/text/tokenizer.h"

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

class ByteEncoder : public Encoder {
 public:
  void encode(std::string_view text, const EncodeOptions&, std::vector<std::int64_t>& tokens) override {
    for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  }
};

class ByteTokenizer : public Tokenizer {
 public:
  std::int64_t vocab() const override { return 256; }
  std::optional<std::int64_t> end_of_text() const override { return std::nullopt; }
  std::unique_ptr<Encoder> encoder() const override { return std::make_unique<ByteEncoder>(); }

  std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions&) const override {
    std::string text;
    for (const auto token : tokens)
      if (token >= 0 && token < vocab()) text += static_cast<char>(token);
    return text;
  }

  std::optional<std::int64_t> find(std::string_view token) const override {
    if (token.size() != 1) return std::nullopt;
    return static_cast<unsigned char>(token[0]);
  }
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> open_tokenizer(const TokenizerChoice& choice) {
  if (choice.name == "bytes") return byte_tokenizer();
  fs::path file = choice.name;
  if (fs::is_directory(file)) {
    const fs::path json = file / "tokenizer.json", model = file / "tokenizer.model";
    if (!fs::exists(json) && !fs::exists(model))
      fail_config("'{}': has neither a tokenizer.json nor a tokenizer.model", choice.name);
    file = fs::exists(json) ? json : model;
  }
  if (file.extension() == ".json") return tokenizer_file(file);
  return sentencepiece_tokenizer({.model = file.string(), .program = (choice.folder / "bonfire_sentencepiece").string()});
}

}  // namespace bonfire
