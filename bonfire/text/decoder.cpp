#include "bonfire/text/decoder.h"

#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/text/byte_letters.h"
#include "bonfire/text/normalizer.h"
#include "bonfire/text/utf8.h"

namespace bonfire {
namespace {

std::string joined(const Decoder::Pieces& pieces) {
  std::string text;
  for (const auto& piece : pieces) text += piece;
  return text;
}

// A token that was added may have letters that stand for no byte: it is its own text.
void letters_to_bytes(Decoder::Pieces& pieces) {
  std::string text;
  for (const auto& piece : pieces) text += bytes_of_letters(piece).value_or(piece);
  pieces = {utf8::repaired(text)};
}

// The byte of a token such as <0x0A>; -1: it is none.
int byte_of(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  unsigned byte = 0;
  const auto read = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  return read.ec == std::errc() && read.ptr == token.data() + 5 ? static_cast<int>(byte) : -1;
}

void bytes_of_tokens(Decoder::Pieces& pieces) {
  Decoder::Pieces out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (utf8::well_formed(bytes))
      out.push_back(bytes);
    else
      out.insert(out.end(), bytes.size(), std::string(utf8::replacement));
    bytes.clear();
  };
  for (auto& piece : pieces) {
    if (const int byte = byte_of(piece); byte >= 0) {
      bytes += static_cast<char>(byte);
      continue;
    }
    flush();
    out.push_back(std::move(piece));
  }
  flush();
  pieces = std::move(out);
}

struct Strip {
  std::string letter;
  std::int64_t start = 0, stop = 0;

  void operator()(Decoder::Pieces& pieces) const {
    for (auto& piece : pieces) {
      for (std::int64_t i = 0; i < start && piece.starts_with(letter); ++i) piece.erase(0, letter.size());
      for (std::int64_t i = 0; i < stop && piece.ends_with(letter); ++i) piece.erase(piece.size() - letter.size());
    }
  }
};

std::string letter_of(const Json& json) {
  const std::string& letter = json.string();
  if (letter.empty() || utf8::start_of(letter).bytes != letter.size()) json.refuse("must be one character");
  return letter;
}

}  // namespace

std::string Decoder::text_of(Pieces tokens) const {
  for (const auto& step : steps_) step(tokens);
  return given_ ? joined(tokens) : fmt::format("{}", fmt::join(tokens, " "));
}

void Decoder::add(const Json& json) {
  const std::string& type = json.at("type").string();
  if (type == "Sequence") {
    for (const auto& step : json.at("decoders").items()) add(step);
  } else if (type == "ByteLevel") {
    steps_.push_back(letters_to_bytes);
  } else if (type == "ByteFallback") {
    steps_.push_back(bytes_of_tokens);
  } else if (type == "Fuse") {
    steps_.push_back([](Pieces& pieces) { pieces = {joined(pieces)}; });
  } else if (type == "Strip") {
    steps_.push_back(Strip{letter_of(json.at("content")), json.at("start").integer(), json.at("stop").integer()});
  } else if (type == "Replace") {
    steps_.push_back([from = literal_pattern(json.at("pattern")), to = json.at("content").string()](Pieces& pieces) {
      for (auto& piece : pieces) replace_all(piece, from, to);
    });
  } else if (type == "Metaspace") {
    const auto scheme = json.find("prepend_scheme");
    const bool prepended = !scheme || scheme->string() != "never";
    steps_.push_back([letter = letter_of(json.at("replacement")), prepended](Pieces& pieces) {
      for (std::size_t at = 0; at < pieces.size(); ++at) replace_all(pieces[at], letter, at == 0 && prepended ? "" : " ");
    });
  } else {
    json.refuse(fmt::format(
        "decoder '{}' is not supported; allowed: Sequence, ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace", type));
  }
}

}  // namespace bonfire
