#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bonfire {

// A token that text is searched for before it is cut into words.
struct AddedToken {
  std::int64_t id = 0;
  std::string content;
  bool special = false;
  bool takes_space_before = false, takes_space_after = false;
  bool normalized = false;  // it is looked for in normalized text
};

// Finds tokens in text: at every position the longest one.
class AddedTokens {
 public:
  void add(const AddedToken& token, const std::string& content);
  bool empty() const { return tokens_.empty(); }

  // Calls, from left to right, `between` for each part of the text that is not empty and `found` for each token.
  // REQUIRES: well-formed text.
  void split(std::string_view text, const std::function<void(std::string_view part, std::size_t begin)>& between,
             const std::function<void(std::int64_t id)>& found) const;

 private:
  static constexpr std::uint32_t none = 0;

  std::uint32_t next(std::uint32_t node, char letter) const;
  std::uint32_t longest(std::string_view text, std::size_t& bytes) const;

  // A tree of letters: node 0 is its root, and no letter leads there.
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;
  std::vector<std::uint32_t> ends_{none};  // of each node: 1 + the index of the token that ends there
  std::array<bool, 256> starts_{};
  std::vector<AddedToken> tokens_;
};

}  // namespace bonfire
