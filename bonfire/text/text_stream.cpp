#include "bonfire/text/text_stream.h"

#include "bonfire/text/utf8.h"

namespace bonfire {

std::string TextStream::push(std::span<const std::int64_t> tokens) {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  return advance(false);
}

std::string TextStream::finish() { return advance(true); }

std::string TextStream::advance(bool last) {
  const std::span<const std::int64_t> all(tokens_);
  const std::string before = tokenizer_.decode(all.first(given_), options_);
  std::string now = tokenizer_.decode(all, options_);
  const bool waits = now.ends_with(utf8::replacement) || utf8::unfinished(now) > 0;
  if ((waits && !last) || now.size() <= before.size()) return {};
  // The tokens that were given before are no longer needed: those of this call stand before what follows.
  tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(given_));
  given_ = tokens_.size();
  return now.substr(before.size());
}

}  // namespace bonfire
