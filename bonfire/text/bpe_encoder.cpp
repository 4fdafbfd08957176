#include "bonfire/text/bpe_encoder.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "bonfire/text/utf8.h"

namespace bonfire {

void BpeEncoder::encode(std::string_view word, std::vector<std::int64_t>& tokens) {
  if (model_.alphabet() == Alphabet::bytes || model_.whole_word(word) != nullptr) return encode_whole(word, tokens);
  // Where two characters are never joined, what stands before them is merged without regard to what follows. So text that
  // nothing has cut falls into words after all.
  std::size_t begin = 0;
  std::uint32_t before = 0;
  for (std::size_t at = 0; at < word.size();) {
    const std::size_t bytes = utf8::start_of(word.substr(at)).bytes;
    const std::uint32_t character = packed_character(word.substr(at, bytes));
    if (at > 0 && !model_.may_join(before, character)) {
      encode_whole(word.substr(begin, at - begin), tokens);
      begin = at;
    }
    before = character;
    at += bytes;
  }
  encode_whole(word.substr(begin), tokens);
}

void BpeEncoder::encode_whole(std::string_view word, std::vector<std::int64_t>& tokens) {
  if (word.size() > Remembered{}.word.size()) return encode_part(word, tokens);
  Remembered& place = remembered_[std::hash<std::string_view>()(word) % places];
  if (place.bytes == word.size() && std::memcmp(place.word.data(), word.data(), word.size()) == 0) {
    tokens.insert(tokens.end(), place.tokens.begin(), place.tokens.begin() + place.count);
    return;
  }
  const std::size_t first = tokens.size();
  encode_part(word, tokens);
  if (tokens.size() - first > place.tokens.size()) return;
  std::memcpy(place.word.data(), word.data(), word.size());
  place.bytes = static_cast<std::uint8_t>(word.size());
  place.count = static_cast<std::uint8_t>(tokens.size() - first);
  std::transform(tokens.begin() + static_cast<std::ptrdiff_t>(first), tokens.end(), place.tokens.begin(),
                 [](std::int64_t token) { return static_cast<std::uint32_t>(token); });
}

void BpeEncoder::encode_part(std::string_view word, std::vector<std::int64_t>& tokens) {
  if (const auto* whole = model_.whole_word(word)) {
    tokens.push_back(*whole);
    return;
  }
  starts_.clear();
  for (std::size_t at = 0; at < word.size();) at += model_.start(word.substr(at), starts_);
  symbols_.clear();
  for (const auto token : starts_) {
    const auto at = static_cast<std::int32_t>(symbols_.size());
    symbols_.push_back({.token = token, .before = at - 1, .after = at + 1});
  }
  symbols_.back().after = -1;
  merge_symbols();
  for (const auto& symbol : symbols_)
    if (!symbol.gone) tokens.push_back(symbol.token);
}

void BpeEncoder::consider(std::int32_t left) {
  if (left < 0) return;
  const Symbol& symbol = symbols_[static_cast<std::size_t>(left)];
  if (symbol.after < 0) return;
  const Merge* merge = model_.merge(symbol.token, symbols_[static_cast<std::size_t>(symbol.after)].token);
  if (merge == nullptr) return;
  candidates_.push_back({*merge, left});
  std::push_heap(candidates_.begin(), candidates_.end());
}

void BpeEncoder::merge_symbols() {
  candidates_.clear();
  for (std::size_t at = 0; at + 1 < symbols_.size(); ++at) consider(static_cast<std::int32_t>(at));
  while (!candidates_.empty()) {
    std::pop_heap(candidates_.begin(), candidates_.end());
    const Candidate best = candidates_.back();
    candidates_.pop_back();
    Symbol& left = symbols_[static_cast<std::size_t>(best.left)];
    if (left.gone || left.after < 0) continue;
    Symbol& right = symbols_[static_cast<std::size_t>(left.after)];
    // The two may have changed since. What counts is what they become: `tokenizers` looks no further.
    const Merge* now = model_.merge(left.token, right.token);
    if (now == nullptr || now->result != best.merge.result) continue;
    left.token = now->result;
    left.after = right.after;
    right.gone = true;
    if (right.after >= 0) symbols_[static_cast<std::size_t>(right.after)].before = best.left;
    consider(left.before);
    consider(best.left);
  }
}

}  // namespace bonfire
