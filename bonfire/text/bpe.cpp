#include "bonfire/text/bpe.h"

#include <bit>
#include <limits>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/text/byte_letters.h"
#include "bonfire/text/utf8.h"

namespace bonfire {
namespace {

constexpr std::uint64_t no_pair = std::numeric_limits<std::uint64_t>::max();
constexpr std::int64_t most_ids = std::int64_t{1} << 28;
constexpr std::uint64_t join_bits = 1 << 20;

std::uint64_t pair_of(std::uint32_t left, std::uint32_t right) { return std::uint64_t{left} << 32 | right; }
std::uint64_t scattered(std::uint64_t value) { return (value * 0x9E3779B97F4A7C15u) >> 20; }

// A key that may be missing or null, or else must have this value.
template <class Value>
void only(const Json& model, const char* key, const Value& allowed, const char* written) {
  const auto found = model.find(key);
  if (found && !found->is_null() && !allowed(*found))
    found->refuse(fmt::format("'{}' is supported only as {}", key, written));
}

std::string_view last_character(const std::string& text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return std::string_view(text).substr(begin);
}

}  // namespace

std::uint32_t packed_character(std::string_view character) {
  std::uint32_t packed = 0;
  for (const char byte : character) packed = packed << 8 | static_cast<unsigned char>(byte);
  return packed;
}

Bpe::Bpe(const Json& model, Alphabet alphabet) : alphabet_(alphabet) {
  if (const auto type = model.find("type"); type && type->string() != "BPE")
    type->refuse(fmt::format("model '{}' is not supported; allowed: BPE", type->string()));
  const auto none = [](const Json& value) { return value.string().empty(); };
  only(
      model, "dropout", [](const Json& value) { return value.number() == 0; }, "null or 0");
  only(model, "continuing_subword_prefix", none, "null or \"\"");
  only(model, "end_of_word_suffix", none, "null or \"\"");
  if (alphabet == Alphabet::characters) {
    const auto fallback = model.at("byte_fallback");
    if (!fallback.boolean()) fallback.refuse("is false, which is supported only with the pre_tokenizer ByteLevel");
  } else {
    only(
        model, "byte_fallback", [](const Json& value) { return !value.boolean(); },
        "false where the pre_tokenizer is ByteLevel");
  }

  read_vocab(model.at("vocab"));
  read_merges(model.at("merges"));
  for (int byte = 0; byte < 256; ++byte) {
    const std::string spelling =
        alphabet == Alphabet::bytes ? letters_of(std::string(1, static_cast<char>(byte))) : fmt::format("<0x{:02X}>", byte);
    bytes_[static_cast<std::size_t>(byte)] = id_in(model.at("vocab"), spelling);
  }
  const auto whole = model.find("ignore_merges");
  if (whole && whole->boolean())
    for (const auto& [spelling, id] : ids_) words_.emplace(text_of(spelling), id);
}

void Bpe::read_vocab(const Json& vocab) {
  for (const auto& [spelling, value] : vocab.members()) {
    const std::int64_t id = value.integer();
    if (id < 0 || id >= most_ids) value.refuse(fmt::format("token {} must be 0 to {}", id, most_ids - 1));
    const auto at = ids_.emplace(spelling, static_cast<std::uint32_t>(id)).first;
    if (!spellings_.emplace(static_cast<std::uint32_t>(id), &at->first).second)
      value.refuse(fmt::format("token {} is also '{}'", id, *spellings_.at(static_cast<std::uint32_t>(id))));
    vocab_ = std::max(vocab_, id + 1);
    if (alphabet_ == Alphabet::characters && !spelling.empty() && utf8::start_of(spelling).bytes == spelling.size())
      characters_.emplace(packed_character(spelling), static_cast<std::uint32_t>(id));
  }
}

std::uint32_t Bpe::id_in(const Json& of, const std::string& spelling) const {
  const auto found = ids_.find(spelling);
  if (found == ids_.end()) of.refuse(fmt::format("the vocabulary has no token '{}'", spelling));
  return found->second;
}

void Bpe::read_merges(const Json& merges) {
  joins_.resize(join_bits / 64);
  std::uint32_t rank = 0;
  for (const auto& merge : merges.items()) add_merge(merge, rank++);
  build_merges();
}

// Older files write "left right", newer ones ["left", "right"].
void Bpe::add_merge(const Json& merge, std::uint32_t rank) {
  std::string left, right;
  if (merge.is_string()) {
    const std::string& both = merge.string();
    const std::size_t space = both.find(' ');
    if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos)
      merge.refuse("must be two tokens with a space between them");
    left = both.substr(0, space);
    right = both.substr(space + 1);
  } else {
    const auto both = merge.items();
    if (both.size() != 2) merge.refuse(fmt::format("has {} tokens, must have 2", both.size()));
    left = both[0].string();
    right = both[1].string();
  }
  if (left.empty() || right.empty()) merge.refuse("merges nothing with a token");
  merges_.push_back({pair_of(id_in(merge, left), id_in(merge, right)), {rank, id_in(merge, left + right)}});
  note_join(left, right);
}

// A table of places by hash, at most half full. Where a pair is merged twice, the later line counts, as for others.
void Bpe::build_merges() {
  std::vector<PairMerge> table(std::bit_ceil(2 * merges_.size() + 1), PairMerge{no_pair, {}});
  for (const auto& entry : merges_) {
    std::size_t at = scattered(entry.pair) & (table.size() - 1);
    while (table[at].pair != no_pair && table[at].pair != entry.pair) at = (at + 1) & (table.size() - 1);
    table[at] = entry;
  }
  merges_ = std::move(table);
}

const Merge* Bpe::merge(std::uint32_t left, std::uint32_t right) const {
  const std::uint64_t pair = pair_of(left, right);
  for (std::size_t at = scattered(pair) & (merges_.size() - 1); merges_[at].pair != no_pair;
       at = (at + 1) & (merges_.size() - 1))
    if (merges_[at].pair == pair) return &merges_[at].merge;
  return nullptr;
}

void Bpe::note_join(const std::string& left, const std::string& right) {
  if (alphabet_ != Alphabet::characters) return;
  const auto after = std::string_view(right).substr(0, utf8::start_of(right).bytes);
  const std::uint64_t bit =
      scattered(pair_of(packed_character(last_character(left)), packed_character(after))) & (join_bits - 1);
  joins_[bit / 64] |= std::uint64_t{1} << (bit % 64);
}

bool Bpe::may_join(std::uint32_t before, std::uint32_t after) const {
  const std::uint64_t bit = scattered(pair_of(before, after)) & (join_bits - 1);
  return joins_[bit / 64] >> (bit % 64) & 1;
}

std::size_t Bpe::start(std::string_view text, std::vector<std::uint32_t>& tokens) const {
  const auto byte = [&](std::size_t at) { return bytes_[static_cast<unsigned char>(text[at])]; };
  if (alphabet_ == Alphabet::bytes) {
    tokens.push_back(byte(0));
    return 1;
  }
  const std::size_t bytes = utf8::start_of(text).bytes;
  if (const auto found = characters_.find(packed_character(text.substr(0, bytes))); found != characters_.end())
    tokens.push_back(found->second);
  else
    for (std::size_t at = 0; at < bytes; ++at) tokens.push_back(byte(at));
  return bytes;
}

const std::uint32_t* Bpe::whole_word(std::string_view word) const {
  if (words_.empty()) return nullptr;
  const auto found = words_.find(std::string(word));
  return found == words_.end() ? nullptr : &found->second;
}

std::string Bpe::text_of(const std::string& spelling) const {
  if (alphabet_ == Alphabet::characters) return spelling;
  return bytes_of_letters(spelling).value_or(std::string());
}

std::optional<std::int64_t> Bpe::find(const std::string& spelling) const {
  const auto found = ids_.find(spelling);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* Bpe::spelling(std::int64_t id) const {
  if (id < 0 || id >= vocab_) return nullptr;
  const auto found = spellings_.find(static_cast<std::uint32_t>(id));
  return found == spellings_.end() ? nullptr : found->second;
}

}  // namespace bonfire
