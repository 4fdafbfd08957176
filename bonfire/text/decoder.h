#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bonfire/base/json.h"

namespace bonfire {

// How spelled tokens become text again: the key `decoder` of a tokenizer's file.
class Decoder {
 public:
  using Pieces = std::vector<std::string>;

  Decoder() = default;  // tokens with spaces between them
  // Throws ConfigError that names what is not supported.
  explicit Decoder(const Json& json) : given_(true) { add(json); }

  // What is no UTF-8 becomes U+FFFD.
  std::string text_of(Pieces tokens) const;

 private:
  void add(const Json& json);

  bool given_ = false;
  std::vector<std::function<void(Pieces& pieces)>> steps_;
};

}  // namespace bonfire
