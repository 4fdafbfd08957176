#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "bonfire/text/bpe.h"

namespace bonfire {

// Encodes words, one thread at a time, and remembers short ones.
class BpeEncoder {
 public:
  explicit BpeEncoder(const Bpe& model) : model_(model), remembered_(places) {}

  // Appends the tokens of a word, which is not empty.
  void encode(std::string_view word, std::vector<std::int64_t>& tokens);

 private:
  // The words of most texts: one line of the processor's cache each.
  struct Remembered {
    std::array<char, 26> word{};
    std::uint8_t bytes = 0, count = 0;
    std::array<std::uint32_t, 9> tokens{};
  };
  static_assert(sizeof(Remembered) == 64);
  static constexpr std::size_t places = 1 << 16;

  struct Symbol {
    std::uint32_t token = 0;
    std::int32_t before = -1, after = -1;  // none: -1
    bool gone = false;                     // merged with the one before
  };
  struct Candidate {
    Merge merge;
    std::int32_t left = 0;
    // Whether `other` comes before this one.
    bool operator<(const Candidate& other) const {
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank : left > other.left;
    }
  };

  void encode_whole(std::string_view word, std::vector<std::int64_t>& tokens);
  void encode_part(std::string_view word, std::vector<std::int64_t>& tokens);
  void merge_symbols();
  void consider(std::int32_t left);

  const Bpe& model_;
  std::vector<Remembered> remembered_;
  std::vector<std::uint32_t> starts_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> candidates_;  // a heap
};

}  // namespace bonfire
