#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bonfire/base/json.h"

namespace bonfire {

// What words begin as, before anything is merged: bytes, or characters, of which those without a token are bytes too.
enum class Alphabet { bytes, characters };

// A merge of two tokens into one. Of all that are possible in a word the one of the lowest rank comes first, and of two that
// are the same the left one.
struct Merge {
  std::uint32_t rank = 0;
  std::uint32_t result = 0;
};

// Byte-pair encoding: the key `model` of a tokenizer's file. Any thread may read.
class Bpe {
 public:
  // Throws ConfigError that names what is wrong or not supported.
  Bpe(const Json& model, Alphabet alphabet);

  Alphabet alphabet() const { return alphabet_; }
  std::int64_t vocab() const { return vocab_; }  // one more than its largest token
  // By the spelling of the file.
  std::optional<std::int64_t> find(const std::string& spelling) const;
  const std::string* spelling(std::int64_t id) const;  // null: there is none

  // What a whole word is at once, where whole words come before merges.
  const std::uint32_t* whole_word(std::string_view word) const;
  const Merge* merge(std::uint32_t left, std::uint32_t right) const;  // null: they are not merged
  // Appends what the start of `text` is before merges, and returns its bytes.
  std::size_t start(std::string_view text, std::vector<std::uint32_t>& tokens) const;
  // Whether some merge joins what ends with one character to what begins with the other. It may say so where none does.
  bool may_join(std::uint32_t before, std::uint32_t after) const;

 private:
  void read_vocab(const Json& vocab);
  void read_merges(const Json& merges);
  void add_merge(const Json& merge, std::uint32_t rank);
  void build_merges();
  std::uint32_t id_in(const Json& of, const std::string& spelling) const;
  std::string text_of(const std::string& spelling) const;
  void note_join(const std::string& left, const std::string& right);

  struct PairMerge {
    std::uint64_t pair;
    Merge merge;
  };

  Alphabet alphabet_;
  std::int64_t vocab_ = 0;
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::unordered_map<std::uint32_t, const std::string*> spellings_;
  std::array<std::uint32_t, 256> bytes_{};
  std::unordered_map<std::uint32_t, std::uint32_t> characters_;  // by their bytes, as one number
  std::unordered_map<std::string, std::uint32_t> words_;         // only where whole words come first
  std::vector<PairMerge> merges_;                                // in the file's order, then by hash, with gaps
  std::vector<std::uint64_t> joins_;                             // one bit for each hash of two characters
};

// The bytes of one character as a number.
std::uint32_t packed_character(std::string_view character);

}  // namespace bonfire
